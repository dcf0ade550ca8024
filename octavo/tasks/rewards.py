"""Rewards beside the check of a task: a format, a Python function of the user's, a reward model.

Format and function run in the worker processes of `VerifierPool`; the model's scores are `trainer.reward_model`'s.
"""

import asyncio
import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

THINK_THEN_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>(?:(?!</?think>).)*\S(?:(?!</?think>).)*"


@dataclass(frozen=True, kw_only=True)
class FormatReward:
    """1 where the whole completion is of a form, else 0."""

    shorthand: ClassVar[str] = "pattern"

    pattern: str = THINK_THEN_ANSWER
    """A regular expression of Python's; a dot is any character, line ends too. The default wants one
    <think>...</think> and something behind it. A prompt that ends in <think> leaves it out of the completion."""
    weight: float = 0.1
    """In the sum of rewards."""

    def __post_init__(self) -> None:
        check_weight(self.weight)
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r} is no regular expression: {error}. Correct it") from error


@dataclass(frozen=True, kw_only=True)
class PythonReward:
    """What a function of yours returns: a number for (prompt, completion, answer), all text."""

    shorthand: ClassVar[str] = "function"

    function: str
    """file.py:name or package.module:name; the function may be async. Each worker process imports it once."""
    weight: float = 1.0
    """In the sum of rewards."""

    def __post_init__(self) -> None:
        check_weight(self.weight)
        module, _, name = self.function.rpartition(":")
        if not module or not name.isidentifier():
            raise ValueError(f"function is written file.py:name or package.module:name; got {self.function!r}")


@dataclass(frozen=True, kw_only=True)
class ModelReward:
    """The score of a Hugging Face model for sequence classification, on the run's device."""

    shorthand: ClassVar[str] = "path"

    path: str
    """Its folder, or its name on the hub; the model has one label."""
    weight: float = 1.0
    """In the sum of rewards."""
    batch_size: int = 8
    """Completions in one forward pass."""
    max_tokens: int = 4096
    """Of prompt and completion together; what exceeds it is cut off at the beginning."""

    def __post_init__(self) -> None:
        check_weight(self.weight)
        for name in ("batch_size", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What training maximises: a weighted sum. Evaluation counts what the task's check finds, whatever stands here."""

    check_weight: float = 1.0
    """Of the task's own check: 1 for a right answer, 0 for any other outcome, unless the task gives shares."""
    format: FormatReward | None = None
    """Its pattern alone may stand for the section."""
    python: PythonReward | None = None
    """Its function alone may stand for the section."""
    model: ModelReward | None = None
    """Its path alone may stand for the section."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.check_weight):
            raise ValueError(f"check_weight is finite; got {self.check_weight}")
        if self.check_weight == 0.0 and not self.weights().keys() - {"check"}:
            raise ValueError("check_weight=0 leaves nothing to learn from. Add format, python or model, or raise it")

    def weights(self) -> dict[str, float]:
        """Weight of each part by its name; the check first."""
        parts = {name: getattr(self, name) for name in ("format", "python", "model")}
        return {"check": self.check_weight, **{name: part.weight for name, part in parts.items() if part is not None}}


def check_weight(weight: float) -> None:
    """ValueError unless a part's weight says something."""
    if not math.isfinite(weight) or weight == 0.0:
        raise ValueError(f"weight is finite and not 0; got {weight}. Leave the part out instead")


def format_score(pattern: str, completion_text: str) -> float:
    """1.0 if the whole completion matches, else 0.0."""
    return float(re.fullmatch(pattern, completion_text, flags=re.DOTALL) is not None)


def python_score(function: str, prompt: str, completion: str, answer: str) -> float:
    """What the user's function says.

    Raises:
        ValueError: no function of that name, or it returns no finite number; whatever else it raises.
    """
    value = load_function(function)(prompt, completion, answer)
    if inspect.isawaitable(value):
        value = asyncio.run(_awaited(value))
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{function} returned {value!r:.100}; wants a number") from error
    if not math.isfinite(number):
        raise ValueError(f"{function} returned {number}; wants a finite number")
    return number


async def _awaited(value: Any) -> Any:
    return await value


@lru_cache(maxsize=8)
def load_function(function: str) -> Callable[..., Any]:
    """The function behind "file.py:name" or "package.module:name".

    Raises:
        ValueError: there is none; whatever the file raises when it is imported.
    """
    place, _, name = function.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"{place} has no function {name}")
    return found


def has_function(function: str) -> bool:
    """For a worker, before a run: True, or what `load_function` raises."""
    return callable(load_function(function))


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))  # it may import what lies beside it
    spec = importlib.util.spec_from_file_location(f"octavo_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
