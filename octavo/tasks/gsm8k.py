"""GSM8K: grade-school word problems whose answer is a number, from a local folder or from the hub."""

from dataclasses import dataclass
from typing import ClassVar

from octavo.tasks.datasets import DatasetConfig, check_counts
from octavo.tasks.presets import NUMBER
from octavo.tasks.problem import Task


@dataclass(frozen=True, kw_only=True)
class GSM8KConfig:
    """The data set preset gsm8k with its most used keys."""

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
    instruction: str = NUMBER
    """Appended to each problem; the check reads the last box, else the last ####, else the last number."""

    def __post_init__(self) -> None:
        check_counts(self, "num_train", "num_test")

    def build(self) -> Task:
        """Reads the problems from disk, or from the hub if `path` is no folder."""
        return DatasetConfig(preset="gsm8k", **vars(self)).build()
