"""docs/config.md is what the code gives, and every key is explained."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from octavo.trainer.config import TrainConfig
from octavo.trainer.config_reference import reference, section_text, sections

PAGE = Path(__file__).resolve().parents[2] / "docs/config.md"


@dataclass(frozen=True)
class Common:
    seed: int = 3
    """Of the
    samples."""


@dataclass(frozen=True)
class Fast(Common):
    """The fast one."""

    type_name: ClassVar[str] = "fast"
    seed: int = 4
    """Its own."""
    mode: Literal["on", "off"] = "on"
    """On | off."""


@dataclass(frozen=True)
class Whole:
    """All of it."""

    name: str
    """What it is called."""
    sizes: tuple[int, ...] | None = (1, 2)
    """Widths."""
    part: Fast | None = field(default_factory=lambda: Fast(seed=7))
    """May be left out."""
    other: Common | None = None
    """Nothing at first."""


def test_a_page_by_hand():
    whole, part, other = (section_text(section).splitlines() for section in sections(Whole))
    assert whole == [
        "## Top level",
        "",
        "All of it.",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
        "| `name` | text | required | What it is called. |",
        "| `sizes` | list of integer or null | `[1, 2]` | Widths. |",
    ]
    assert part[0] == "## part, type: fast" and part[2] == "The fast one. May be left out."
    assert part[6:] == [
        "| `part.type` | `fast` | required | Chooses `fast`. |",
        "| `part.seed` | integer | `7` | Its own. |",  # the field's default, not the class's
        '| `part.mode` | `on`, `off` | `"on"` | On \\| off. |',
    ]
    assert other[0] == "## other" and other[2].endswith("Nothing at first. Default: null.")
    assert other[6] == "| `other.seed` | integer | `3` | Of the samples. |"


def test_the_committed_page_is_what_the_code_gives():
    assert PAGE.read_text(encoding="utf-8") == reference(), "docs/config.md is out of date; run `make docs`"


def test_every_key_and_every_section_is_explained():
    unexplained = []
    for section in sections(TrainConfig):
        doc = section.config_class.__doc__ or ""
        if not doc or doc.startswith(f"{section.config_class.__name__}("):  # what dataclass writes by itself
            unexplained.append(section.path)
        unexplained += [key for key, _, _, meaning in section.keys() if not meaning]
    assert not unexplained, f"no text under {unexplained}"


def test_every_key_of_a_complete_config_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    num_keys = 0
    for section in sections(TrainConfig):
        for item in dataclasses.fields(section.config_class):
            key = f"{section.path}.{item.name}" if section.path else item.name
            assert f"`{key}`" in page or f"## {key}" in page, key
            num_keys += 1
    assert num_keys > 70
