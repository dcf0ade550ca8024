"""A task that draws its problems from several others, each as often as its weight says."""

import math
from dataclasses import dataclass
from typing import ClassVar

from octavo.tasks.arithmetic import ArithmeticConfig
from octavo.tasks.datasets import DatasetConfig
from octavo.tasks.gsm8k import GSM8KConfig
from octavo.tasks.mixing import mix
from octavo.tasks.problem import Task
from octavo.tasks.reasoning_gym import ReasoningGymConfig


@dataclass(frozen=True, kw_only=True)
class PartConfig:
    """One part of a mixture."""

    weight: float = 1.0
    """Its share of the prompts, relative to the other weights. Above 0."""
    task: DatasetConfig | GSM8KConfig | ArithmeticConfig | ReasoningGymConfig
    """A section like `task` itself, but no mixture."""

    def __post_init__(self) -> None:
        if not 0.0 < self.weight < math.inf:
            raise ValueError(f"weight is above 0; got {self.weight}. Leave out a part that is not wanted")


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Several tasks at once."""

    type_name: ClassVar[str] = "mixture"

    name: str = "mixture"
    """For logs."""
    parts: tuple[PartConfig, ...]
    """What it is made of, two parts at least."""

    def __post_init__(self) -> None:
        if len(self.parts) < 2:
            raise ValueError(f"parts wants at least two; got {len(self.parts)}. Use the task itself instead")

    def build(self) -> Task:
        """Builds the parts; their held-out problems stay apart, as sets of the evaluation."""
        tasks = [part.task.build() for part in self.parts]
        for task in tasks:
            if not task.train:
                raise ValueError(f"part {task.name!r} of the mixture has no training problems. Leave it out")
        return mix(self.name, tasks, [part.weight for part in self.parts])
