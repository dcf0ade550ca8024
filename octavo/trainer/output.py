"""The folder of a run, and what makes it safe: one process at a time, nothing lost by a mistake or a full disk.

    config.yaml      the complete config          precision.json  the precision flow, as it was checked
    metrics.jsonl    a line a step                samples.jsonl   some completions of each step
    resumes.jsonl    a line a resume              audit.jsonl     the newest completions of each outcome
    checkpoints/     what the run can go on from  model/          the trained model
    rollbacks/       what each rollback undid     failure/        diagnosis of a run that diverged

Every file but the line files is replaced whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from octavo.trainer.audit import Audit
from octavo.trainer.checkpoint import FOLDER as CHECKPOINTS
from octavo.trainer.config import TrainConfig
from octavo.trainer.files import write_whole

ROLLBACKS = "rollbacks"
MASTER_AND_MOMENTS_BYTES = 12
"""Of a parameter in a checkpoint: FP32 master and two FP32 moments."""
OWN_FILES = ("config.yaml", "samples.jsonl", "resumes.jsonl", "audit.jsonl", "precision.json", "report.html")
OWN_FOLDERS = (CHECKPOINTS, "model", "model.partial", "model.replaced", "failure", "tensorboard", ROLLBACKS)


class JsonLines:
    """A file of JSON objects, one a line. A line that the disk refuses waits in memory for the next call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []

    def extend(self, rows: list[dict[str, Any]]) -> None:
        """Add a line for each row.

        Raises:
            OSError: the disk refuses; the lines wait, and the file ends with a whole line as before.
        """
        self._waiting += [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        self._write()

    def replace(self, rows: list[dict[str, Any]]) -> None:
        """Make these the file's only lines, whole or not at all.

        Raises:
            OSError: the disk refuses; the file is as it was.
        """
        other = JsonLines(self.path.with_name(self.path.name + ".new"))
        try:
            other.path.write_bytes(b"")
            other.extend(rows)
            other.flush()
            other.path.replace(self.path)
        except OSError:
            other.path.unlink(missing_ok=True)
            raise

    def flush(self) -> int:
        """Put every line on disk.

        Returns:
            Size of the file, in bytes.

        Raises:
            OSError: as `extend`.
        """
        self._write()
        with self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def _write(self) -> None:
        if not self._waiting:
            return
        data = memoryview("".join(self._waiting).encode("utf-8", errors="replace"))
        with self.path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError as error:
                file.truncate(size)
                raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._waiting.clear()

    def cut(self, size: int) -> bool:
        """Drop what lies beyond `size` bytes, and what would be half a line before it.

        Returns:
            Whether `size` bytes are left; fewer if the file was shorter or has been edited, and so has lost lines.
        """
        self._waiting.clear()  # of later steps, as a checkpoint is written after its lines
        with self.path.open("ab+") as file:
            kept = min(size, file.tell())
            while kept > 0:
                file.seek(kept - 1)
                if file.read(1) == b"\n":
                    break
                kept -= 1
            file.truncate(kept)
        return kept == size


class RunFolder:
    """The folder of one run, held by this process until it is closed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        self.samples = JsonLines(self.path / "samples.jsonl")
        self.resumes = JsonLines(self.path / "resumes.jsonl")
        self.audit = Audit(self.path / "audit.jsonl")
        self._lock: int | None = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / CHECKPOINTS

    @property
    def holds_run(self) -> bool:
        """Whether a run has been here."""
        return self.metrics.path.exists() or self.checkpoints.is_dir()

    @property
    def has_lines(self) -> bool:
        """Whether a step of the run has been logged."""
        return self.metrics.path.exists() and self.metrics.path.stat().st_size > 0

    def check(self, config: TrainConfig) -> None:
        """Refuse to start a new run where that would lose something. Changes nothing.

        Raises:
            ValueError: an earlier run is there and `overwrite` is false; something is there that no run left and this
                one would replace, or it is the model to train.
        """
        model = Path(config.model.path)
        if model.is_dir() and self.path.resolve() in model.resolve().parents:
            raise ValueError(
                f"model.path={config.model.path!r} lies inside output_dir={config.output_dir!r}, whose model/ this run "
                f"replaces. Give another output_dir"
            )
        if self.holds_run and not config.overwrite:
            raise ValueError(
                f"{self.path} holds an earlier run. Go on with it by --resume, give another output_dir, or "
                f"overwrite=true to replace it"
            )
        foreign = [name for name in (*OWN_FOLDERS, *OWN_FILES) if os.path.lexists(self.path / name)]
        if foreign and not self.holds_run:
            raise ValueError(
                f"{self.path / foreign[0]} is there already and was not left by a run. Give another output_dir"
            )

    def create(self, config: TrainConfig, num_parameters: int, model_bytes: int, replace: bool = False) -> None:
        """Make the folder for a new run, or clear it of the earlier one.

        Args:
            config: of the run.
            num_parameters: masters of the policy, and of a critic.
            model_bytes: of the model folder that the run will leave.
            replace: an earlier run that is there is cleared even without `overwrite`.

        Raises:
            ValueError: as `check`; another process runs there; the disk is too small; it cannot be written.
        """
        if not replace:
            self.check(config)
        self.check_room(config, num_parameters, model_bytes)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock()
            if self.holds_run:
                for name in (*OWN_FOLDERS, *OWN_FILES):
                    _remove(self.path / name)
            self.metrics.path.write_text("", encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"output_dir={str(self.path)!r} cannot be written: {error.strerror}. Give another"
            ) from error

    def write(self, name: str, text: str) -> None:
        """Replace a file of the folder, whole; ValueError when it cannot be written."""
        write_whole(self.path / name, text)

    def read_config(self) -> Any:
        """config.yaml as dicts and lists.

        Raises:
            ValueError: it is missing or damaged.
        """
        try:
            return yaml.safe_load((self.path / "config.yaml").read_bytes())
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(
                f"{self.path / 'config.yaml'} cannot be read, so the earlier run there is unknown: "
                f"{' '.join(str(error).split())}. overwrite=true without --resume replaces it"
            ) from error

    def lock(self) -> None:
        """Keep other processes out until this one closes the folder or ends, however it ends.

        Raises:
            ValueError: another process is there.
        """
        if self._lock is not None:
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise ValueError(
                f"{self.path} is in use by another octavo process. Wait for it, or give another output_dir"
            ) from error
        self._lock = descriptor

    def check_room(self, config: TrainConfig, num_parameters: int, model_bytes: int) -> str:
        """Refuse a disk that cannot hold the model and the checkpoints, one more than are kept: the new comes first.

        Returns:
            What is needed and what is free, for the user.

        Raises:
            ValueError: as said; with the arithmetic.
        """
        checkpoint_bytes = MASTER_AND_MOMENTS_BYTES * num_parameters
        rolls_back = config.watch is not None and config.watch.action == "rollback"
        num_checkpoints = config.checkpoint.keep_last + 1 + config.checkpoint.keep_best + 3 * rolls_back
        needed = model_bytes + num_checkpoints * checkpoint_bytes
        old = [file for name in OWN_FOLDERS for file in (self.path / name).rglob("*") if file.is_file()]
        folder = next(path for path in (self.path.absolute(), *self.path.absolute().parents) if path.exists())
        free = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in old)
        sizes = (
            f"{free / 1e6:.0f} MB free; the trained model takes {model_bytes / 1e6:.0f} MB and each of "
            f"{num_checkpoints} checkpoints {checkpoint_bytes / 1e6:.0f} MB"
        )
        if free < 1.05 * needed:
            best = ", one for the best" * config.checkpoint.keep_best
            raise ValueError(
                f"output_dir={str(self.path)!r} has {sizes} (checkpoint.keep_last={config.checkpoint.keep_last}, one "
                f"for the new{best}). Make room, keep fewer, or give another"
            )
        return sizes


def _remove(path: Path) -> None:
    """Remove a file or folder, if it is there; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
