"""Config classes of every kind of field, and the messages they give."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pytest

from octavo.trainer.config_file import ConfigError, from_dict


@dataclass(frozen=True, kw_only=True)
class PPOClip:
    type_name: ClassVar[str] = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self):
        if not 0.0 <= self.clip_low < 1.0:
            raise ValueError(f"clip_low is an offset below 1,\n in [0, 1); got {self.clip_low}")


@dataclass(frozen=True, kw_only=True)
class CISPO:
    type_name: ClassVar[str] = "cispo"
    ratio_cap: float


@dataclass(frozen=True, kw_only=True)
class Model:
    path: str
    dtype: Literal["bf16", "fp32"] = "bf16"


@dataclass(frozen=True, kw_only=True)
class TaskSet:
    name: str
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Side:
    shorthand: ClassVar[str] = "recipe"
    recipe: Literal["fp8", "bf16"] | None = None
    margin: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Sides:
    rollout: Side = Side()
    train: Side | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    model: Model
    loss: PPOClip | CISPO = field(default_factory=lambda: PPOClip(clip_low=0.1))
    shadow_loss: PPOClip | CISPO | None = None
    seed: int = 0
    lr: float = 1e-6
    exact: bool = True
    note: str = ""
    stop_after: int | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    keep_bf16: tuple[str, ...] = ("lm_head",)
    tasks: tuple[TaskSet, ...] = ()
    mode: Literal["off", "on", 8] = "on"

    def __post_init__(self):
        if self.seed < 0:
            raise ValueError(f"seed wants 0 or more; got {self.seed}")


MODEL = {"path": "m"}

# The way out that an error ends with.
INTEGER = "Write a whole number, without quotes or point."
FLOAT = "Write it like 0.1 or 1e-6, without quotes."
BOOL = "Write it without quotes."
TEXT = "Put it in quotes."
LITERAL = "Write one of them, spelt as here, quotes too."


def yaml_writer(tmp_path, monkeypatch):
    """A function that writes text to run.yaml in the present folder and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write_text(text):
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        return "run.yaml"

    return write_text


def message_of(call, *args):
    """The message of the ConfigError that call(*args) raises; always one line."""
    with pytest.raises(ConfigError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message, message
    return message


def error_of(**values):
    """The message for a Run of these values in a source named `src`."""
    return message_of(from_dict, Run, {"model": MODEL, **values}, "src")
