"""A task from a data set: a published one by name, or any file, folder or hub data set with its columns named."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from octavo.tasks.checks import CHECKS
from octavo.tasks.few_shot import FewShotConfig
from octavo.tasks.mixing import mix
from octavo.tasks.presets import INSTRUCTIONS, MIXES, PRESETS, CheckName, Preset, PresetName
from octavo.tasks.problem import Task
from octavo.tasks.reader import ProblemReader
from octavo.tasks.rows import Source, data_folder, find_source, take


@dataclass(frozen=True, kw_only=True)
class FieldsConfig:
    """Which column is what. A dotted path goes into nested columns: reward_model.ground_truth, prompt.-1.content."""

    problem: str = "problem"
    """The text that the policy is shown."""
    answer: str = "answer"
    """The reference: text, a number, or a list of which all are required."""
    id: str | None = None
    """A name of the row; null numbers them."""
    solution: str | None = None
    """A worked solution, for few-shot examples."""
    tests: str | None = None
    """Of programming problems: a list of test programs, or one."""

    def read(self, row: dict) -> dict:
        """The row with its columns by our names."""
        return {name: take(row, path) for name, path in vars(self).items() if path is not None}


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Problems from a data set, see docs/data.md. A preset's name stands for the section."""

    type_name: ClassVar[str] = "dataset"
    shorthand: ClassVar[str] = "preset"

    preset: PresetName | None = None
    """A published set: where it is, its columns, its check and its instruction. null wants path."""
    path: str | None = None
    """A file (.jsonl, .jsonl.gz, .json, .csv, .parquet), a folder with one a split, or a hub id; null is the preset's.
    A file is the training problems of a task, and the problems of a benchmark."""
    hub_config: str | None = None
    """Configuration of the data set on the hub; null is the preset's, else the default one."""
    train_split: str | None = "auto"
    """Split to train on; auto is the preset's, else train; null is none."""
    test_split: str | None = "auto"
    """Split to measure on; auto is the preset's, else test; null is none."""
    fields: FieldsConfig | None = None
    """The columns; null is the preset's, else problem and answer."""
    check: CheckName | None = None
    """math, exact, multiple_choice or code; null is the preset's, else math."""
    name: str | None = None
    """For logs and for statistics by data set; null is the preset's, else that of the file, folder or hub data set."""
    num_train: int | None = None
    """Use only the first so many training problems; null uses all of them."""
    num_test: int | None = None
    """Use only the first so many held-out problems; null uses all of them."""
    system_prompt: str | None = None
    """System message for a chat model; null sends none."""
    instruction: str | None = None
    """Appended to each problem; null is the preset's, else what the check needs; "" is none."""
    few_shot: FewShotConfig = field(default_factory=FewShotConfig)
    """Worked examples before each problem."""
    max_bad_rows: int | None = None
    """Rows of a split that may be unusable: they are counted, named and skipped, and one more stops the run. null is
    the preset's, else 0."""

    def __post_init__(self) -> None:
        if self.preset is None and not self.path:
            raise ValueError("a data set wants preset or path; got neither. Name one of the presets, or a file")
        if self.preset is not None and self.fields is not None:
            raise ValueError(f"preset={self.preset} knows its fields; leave out fields, or leave out preset")
        if self.preset in MIXES and self.path is not None:
            raise ValueError(f"preset={self.preset} is several sets; leave out path, or make a task of type mixture")
        check_counts(self, "num_train", "num_test")
        if self.max_bad_rows is not None and self.max_bad_rows < 0:
            raise ValueError(f"max_bad_rows is at least 0, or null; got {self.max_bad_rows}")

    def build(self) -> Task:
        """Reads the problems to train on and those to measure on."""
        return self._build(train=True)

    def build_benchmark(self) -> Task:
        """Reads the problems to measure on alone; training problems only where examples come from them."""
        return self._build(train=False)

    def _build(self, train: bool) -> Task:
        if self.preset in MIXES:
            return mix(self.preset, [replace(self, preset=part)._task(train) for part in MIXES[self.preset]])
        return self._task(train)

    def _task(self, train: bool) -> Task:
        preset = Preset(folder="", train="train", test="test", licence="") if self.preset is None else self._preset()
        check = self.check or preset.check
        name = self.name or self.preset or Path(self.path or "").name.partition(".")[0]
        reader = ProblemReader(
            name=name,
            read=preset.read if self.preset else (self.fields or FieldsConfig()).read,
            needs_tests=check == "code",
            repeats=preset.repeats,
            max_bad_rows=preset.max_bad_rows if self.max_bad_rows is None else self.max_bad_rows,
        )
        examples_in_train = self.few_shot.num_examples > 0 and self.few_shot.path is None
        sources = self._sources(preset, train, examples_in_train)
        problems = {
            role: reader.problems(source, role, self.num_train if role == "train" else self.num_test)
            for role, source in sources.items()
        }
        return Task(
            name=name,
            source=" and ".join(source.name for source in sources.values()),
            train=problems.get("train", ()) if train else (),
            test=problems.get("test", ()),
            check=CHECKS[check],
            system_prompt=self.system_prompt,
            instruction=preset.instruction or INSTRUCTIONS[check] if self.instruction is None else self.instruction,
            examples=self.few_shot.examples(reader, problems.get("train", ()), is_code=check == "code"),
            num_examples=self.few_shot.num_examples,
            notes=tuple(reader.notes),
        )

    def _preset(self) -> Preset:
        assert self.preset is not None
        return PRESETS[self.preset]

    def _sources(self, preset: Preset, train: bool, examples_in_train: bool) -> dict[str, Source]:
        """Role, train or test, -> where its problems are.

        Args:
            preset: which splits the set has, and where it is.
            train: whether training problems are wanted.
            examples_in_train: whether they are wanted for few-shot examples.
        """
        path, hub_config = self.path, self.hub_config or preset.hub_config
        if path is None:
            local = data_folder() / preset.folder
            if not local.is_dir() and preset.hub is None:
                raise ValueError(
                    f"preset={self.preset} wants the folder {local}, which is not there, and the set was never "
                    f"published by itself. Set OCTAVO_DATA to the folder that holds {preset.folder}, or give path"
                )
            path = str(local) if local.is_dir() else str(preset.hub)
        published = {"train": preset.train, "test": preset.test}
        wanted = {"train": self.train_split, "test": self.test_split}
        splits = {
            role: (role, str(published[role])) if split == "auto" else (split,)
            for role, split in wanted.items()
            if split is not None and not (split == "auto" and published[role] is None)
        }
        if Path(path).expanduser().is_file():
            splits = {"train": ("train",)} if train and "train" in splits else {"test": ("test",)}
        if not train and not (examples_in_train and "train" in splits):
            splits.pop("train", None)
        if not splits:
            raise ValueError(f"{path} is left without a split: train_split and test_split are null. Name one of them")
        return {role: find_source(path, names, hub_config) for role, names in splits.items()}


def check_counts(config: Any, *names: str) -> None:
    """ValueError unless each of these fields is None or at least 1."""
    for name in names:
        number = getattr(config, name)
        if number is not None and number < 1:
            raise ValueError(f"{name} is at least 1, or None for all problems; got {number}")
