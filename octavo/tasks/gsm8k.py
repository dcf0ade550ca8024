"""GSM8K: grade-school word problems whose answer is a number, from a local folder or from the hub."""

import gzip
import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import ClassVar

from octavo.tasks.answers import extract_answer, math_equal
from octavo.tasks.problem import Problem, Task
from octavo.tasks.verdict import Verdict, judged

INSTRUCTION = "\nReason step by step, and put the final answer, a number, in \\boxed{} or after ####."


@dataclass(frozen=True, kw_only=True)
class GSM8KConfig:
    """Where the problems are read from, how many are used, and what the policy is told."""

    type_name: ClassVar[str] = "gsm8k"

    path: str = "openai/gsm8k"
    """A folder with train.jsonl and test.jsonl (or .jsonl.gz), else the name of a data set on the hub. For owner/name a
    folder `name` in $OCTAVO_DATA (default ../shared/data) comes first; the run says which it read."""
    hub_config: str = "main"
    """Configuration of the data set on the hub; a local folder has none."""
    num_train: int | None = None
    """Use only the first so many training problems; None uses all of them."""
    num_test: int | None = None
    """Use only the first so many held-out problems; None uses all of them."""
    system_prompt: str | None = None
    """System message for a chat model; None sends none."""
    instruction: str = INSTRUCTION
    """Appended to each problem; the check reads the last box, else the last ####, else the last number."""

    def __post_init__(self) -> None:
        for name in ("num_train", "num_test"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name} is at least 1, or None for all problems; got {number}")

    def build(self) -> Task:
        """Reads the problems from disk, or from the hub if `path` is no folder."""
        folder = Path(self.path).expanduser()
        if not folder.is_dir() and self.path.count("/") == 1 and not self.path.startswith((".", "/", "~")):
            folder = Path(os.environ.get("OCTAVO_DATA", "../shared/data")) / folder.name
        if folder.is_dir():
            splits: dict[str, Iterable[dict]] = {split: _read_jsonl(folder, split) for split in ("train", "test")}
        else:
            splits = _read_hub(self.path, self.hub_config)
        return Task(
            name="gsm8k",
            source=str(folder) if folder.is_dir() else f"the hub's {self.path}",
            train=_problems(splits["train"], f"{self.path} train")[: self.num_train],
            test=_problems(splits["test"], f"{self.path} test")[: self.num_test],
            check=check_gsm8k,
            system_prompt=self.system_prompt,
            instruction=self.instruction,
        )


def check_gsm8k(problem: Problem, completion_text: str) -> Verdict:
    """Correct if the final answer of the completion equals the reference."""
    answer = extract_answer(completion_text)
    return Verdict("unparsable", 0.0, "no answer") if answer is None else judged(math_equal(answer, problem.answer))


def _read_jsonl(folder: Path, split: str) -> list[dict]:
    for name, open_text in ((f"{split}.jsonl", open), (f"{split}.jsonl.gz", gzip.open)):
        file = folder / name
        if not file.is_file():
            continue
        try:
            with open_text(file, "rt", encoding="utf-8") as lines:
                return [_row(line, file, number) for number, line in enumerate(lines, start=1) if line.strip()]
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} cannot be read: {error}. Fetch it again") from error
    present = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise ValueError(
        f"task.path={str(folder)!r} wants {split}.jsonl or {split}.jsonl.gz in that folder; it holds {present}. "
        f"Add the file, or name another folder"
    )


def _row(line: str, file: Path, number: int) -> dict:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise ValueError(f"{file}, line {number}: not JSON ({why}). Correct the line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{file}, line {number}: wants a JSON object, got {type(row).__name__}. Correct the line")
    return row


def _read_hub(name: str, hub_config: str) -> dict[str, Iterable[dict]]:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        raise ValueError(
            f"task.path={name!r} wants an existing folder with train.jsonl and test.jsonl, or a hub data set such as "
            f"'openai/gsm8k'; there is no such folder, and this is no such name. Correct the path"
        )
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"task.path={name!r} is no folder here, so it is read from the hub, which wants the package datasets; it "
            f"is not installed. Run `pip install datasets`, or give a folder with train.jsonl and test.jsonl"
        ) from error
    try:
        return {split: load_dataset(name, hub_config, split=split) for split in ("train", "test")}
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"task.path={name!r} is no folder here, and the hub did not give configuration {hub_config!r} of a data "
            f"set of that name ({reason}). Correct the path, or name a local folder"
        ) from error


def _problems(rows: Iterable[dict], source: str) -> tuple[Problem, ...]:
    """Rows with id, problem and answer, or with the original question and an answer that ends in "#### N"."""
    problems = []
    for index, row in enumerate(rows):
        text, answer = row.get("problem", row.get("question")), row.get("answer")
        final = _final_answer(answer)
        if not isinstance(text, str) or final is None:
            came = f"{text!r:.40} and {answer!r:.40}; its keys are {', '.join(map(repr, row)) or 'none'}"
            raise ValueError(
                f"row {index} of {source} wants text under 'problem' or 'question', and text or a finite number under "
                f"'answer'; got {came}. Correct the row, or rename the columns."
            )
        if not final:
            raise ValueError(
                f"row {index} of {source} wants a final answer; got {answer!r}. Give the number, alone or after ####."
            )
        problems.append(Problem(id=str(row.get("id", f"{source}/{index}")), text=text, answer=final))
    if not problems:
        raise ValueError(f"{source} wants at least one problem; got an empty file. Name another folder.")
    return tuple(problems)


def _final_answer(answer: object) -> str | None:
    """What follows the last ####, or a number in plain digits; None for what is neither text nor a finite number."""
    if isinstance(answer, str):
        return answer.rpartition("####")[2].strip()
    if isinstance(answer, bool) or not isinstance(answer, int | float) or not math.isfinite(answer):
        return None
    return format(Decimal(repr(answer)), "f")  # 1e-05 is not how a completion writes it
