"""docs/config.md from the code: every key, its type, its default, and the text under its field.

python -m octavo.trainer.config_reference > docs/config.md
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from octavo.trainer.config import TrainConfig

HEAD = """# Configuration

Every key of a YAML file, as `octavo train`, `evaluate` and `check` read it. On the command line a key is dotted:
`octavo train examples/demo.yaml optimizer.lr=1e-5 precision.recipe=w8a16`. An unknown key or a value of another type is
an error; a section given in part takes the rest from its defaults. `config.yaml` in a run's folder is complete.

Made from the code by `make docs`; do not edit.
"""
TYPE_NAMES = {bool: "true or false", int: "integer", float: "number", str: "text"}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the file, or one of its variants."""

    path: str
    """Dotted key; empty for the top level."""
    config_class: type
    """Its dataclass."""
    default: Any
    """What the section holds when it is left out; None for null, MISSING where it is required."""
    doc: str
    """The text under its field."""

    @property
    def variant(self) -> str | None:
        """The value of `type` that picks this variant."""
        return getattr(self.config_class, "type_name", None)

    def default_of(self, field: dataclasses.Field) -> Any:
        """What a key holds when it is left out; MISSING where it is required."""
        if type(self.default) is self.config_class:
            return getattr(self.default, field.name)
        return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()

    def keys(self) -> list[tuple[str, Any, Any, str]]:
        """(dotted key, type, default, text) of every key that is no section with a heading of its own."""
        types, docs = get_type_hints(self.config_class), field_docs(self.config_class)
        return [
            (join(self.path, field.name), types[field.name], self.default_of(field), docs.get(field.name, ""))
            for field in dataclasses.fields(self.config_class)
            if self.path.endswith("[]") or not section_classes(types[field.name])
        ]


def sections(
    config_class: type, path: str = "", default: Any = dataclasses.MISSING, doc: str = ""
) -> Iterator[Section]:
    """The section of a dataclass and, below it, those of its fields, in the order of the code."""
    section = Section(path=path, config_class=config_class, default=default, doc=doc)
    yield section
    types, docs = get_type_hints(config_class), field_docs(config_class)
    for field in dataclasses.fields(config_class):
        for inner in section_classes(types[field.name]):
            inner_path, inner_doc = join(path, field.name), docs.get(field.name, "")
            yield from sections(inner, inner_path, section.default_of(field), inner_doc)
        for item in item_classes(types[field.name]):
            yield Section(path=f"{join(path, field.name)}[]", config_class=item, default=dataclasses.MISSING, doc="")


def reference() -> str:
    """The whole page, Markdown."""
    each = dict.fromkeys(section_text(section) for section in sections(TrainConfig))  # variants may share a section
    return "\n".join([HEAD, *each])


def section_text(section: Section) -> str:
    """Heading, class docstring, and a table of the keys."""
    heading = section.path or "Top level"
    if section.variant is not None:
        heading += f", type: {section.variant}"
    doc = inspect.getdoc(section.config_class) or ""
    lines = [f"## {heading}", "", " ".join(f"{doc} {section.doc}".split())]
    if section.path and section.default is None:
        lines[-1] += " Default: null."
    rows = section.keys()
    if section.variant is not None:
        text = f"`{section.variant}`"
        rows = [(join(section.path, "type"), Literal[section.variant], dataclasses.MISSING, f"Chooses {text}."), *rows]
    if rows:
        lines += ["", "| key | type | default | meaning |", "|---|---|---|---|"]
    for key, kind, default, meaning in rows:
        cells = f"`{key}`", type_text(kind), default_text(default), " ".join(meaning.split())
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, ""])


def field_docs(config_class: type) -> dict[str, str]:
    """Field name -> the string that stands under it; a class wins over its bases."""
    docs: dict[str, str] = {}
    for cls in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(cls):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        for node, below in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr):
                if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                    docs[node.target.id] = below.value.value
    return docs


def section_classes(kind: Any) -> tuple[type, ...]:
    """The dataclasses that an annotation allows; none for a plain value."""
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return tuple(member for member in members if isinstance(member, type) and dataclasses.is_dataclass(member))


def item_classes(kind: Any) -> tuple[type, ...]:
    """The dataclasses that the items of a list may be, but for tasks, which have sections of their own."""
    items = section_classes(get_args(kind)[0]) if get_origin(kind) is tuple else ()
    return tuple(item for item in items if not hasattr(item, "type_name"))


def type_text(kind: Any) -> str:
    """An annotation in words."""
    args = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(dict.fromkeys("null" if member is NoneType else type_text(member) for member in args))
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in args)
    if get_origin(kind) is tuple:
        return f"list of {type_text(args[0])}" if Ellipsis in args else f"[{', '.join(map(type_text, args))}]"
    return "section" if dataclasses.is_dataclass(kind) else TYPE_NAMES[kind]


def default_text(value: Any) -> str:
    """A default as YAML spells it."""
    return "required" if value is dataclasses.MISSING else f"`{json.dumps(value, ensure_ascii=False)}`"


def join(path: str, name: str) -> str:
    """A dotted key."""
    return f"{path}.{name}" if path else name


if __name__ == "__main__":
    print(reference(), end="")
