"""Reads a run's YAML file into frozen dataclasses: every key known, every value of its declared type, nothing guessed.

    config = load_config(TrainConfig, "examples/demo.yaml", ["loss.clip_low=0.1", "optimizer.lr=1e-6"])

A field is a bool, int, float, str, Literal[...], tuple[X, ...], tuple[X, Y], another such dataclass, or a union of
dataclasses, of which the key `type` picks one by its `type_name: ClassVar[str]`; each may be `| None`. Where `type` is
left out, the field's default says which. A section given in part takes the rest from the field's default too.
Where a dataclass has a `shorthand: ClassVar[str]`, plain text in place of its section is that one key of it;
as an override it sets that key alone.
A ConfigError is one line: where the value came from, its dotted key, what was wanted, what came, the way out.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

ConfigT = TypeVar("ConfigT")

SCALARS = {  # what is wanted, and the way out
    bool: ("true or false", "Write it without quotes."),
    int: ("an integer", "Write a whole number, without quotes or point."),
    float: ("a finite number", "Write it like 0.1 or 1e-6, without quotes."),
    str: ("text", "Put it in quotes."),
}
LARGEST = 1e30
"""Sums and products of numbers beyond it leave FP32."""
EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")  # 1e-6, which PyYAML reads as text


class _Absent:
    """Where one of two configs has no such key."""

    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line for the user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """A key of the configuration, and where its value came from; errors begin with both."""

    source: str
    """The file, or what the caller of from_dict named."""
    overrides: tuple[str, ...] = ()
    """The overrides `a.b=value`, in the order they were applied."""
    path: str = ""
    """The dotted key, such as tasks[0].name; empty at the top level."""

    def at(self, key: str | int) -> "_Place":
        step = f"[{key}]" if isinstance(key, int) else f".{key}" if self.path else key
        return dataclasses.replace(self, path=self.path + step)

    def origin(self) -> str:
        """The override that set this key, else the source with the overrides that reached below it."""
        for text in reversed(self.overrides):
            if _lies_in(self.path, text.partition("=")[0]):
                return f"override {text!r}"
        below = [repr(text) for text in self.overrides if _lies_in(text.partition("=")[0], self.path)]
        return f"{self.source} with override {', '.join(below)}" if below else self.source

    def error(self, message: str) -> ConfigError:
        return ConfigError(": ".join(part for part in (self.origin(), self.path, message) if part))


def load_config(cls: type[ConfigT], path: str | Path, overrides: Sequence[str] = ()) -> ConfigT:
    """Reads the YAML file at path, lays each override `a.b=value` (value in YAML) over it, then types the whole."""
    try:
        data = _parse_yaml(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}. Give the path of a YAML file.") from error
    for text in overrides if isinstance(data, dict) else ():  # _section refuses any other data
        data = _with_override(data, text, cls)
    return _section((cls,), data, dataclasses.MISSING, _Place(source=str(path), overrides=tuple(overrides)))


def from_dict(cls: type[ConfigT], data: object, source: str) -> ConfigT:
    """Types data, dicts and lists as YAML gives them, into a cls; source names it in errors."""
    return _section((cls,), data, dataclasses.MISSING, _Place(source=source))


def to_dict(config: Any) -> dict[str, Any]:
    """Config dataclass -> dicts and lists, complete, ready for YAML or JSON; from_dict gives back an equal config."""
    values = {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config) if field.init}
    return {"type": config.type_name, **values} if hasattr(config, "type_name") else values


def differences(old: Any, new: Any, path: str = "") -> list[tuple[str, str, str]]:
    """(dotted key, old value, new value) of every key that differs between two configs as `to_dict` gives them.

    Values are shown as YAML spells them; a section or key that one side lacks is "absent" there.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            difference
            for key in dict.fromkeys([*old, *new])
            for difference in differences(old.get(key, _ABSENT), new.get(key, _ABSENT), f"{path}.{key}".strip("."))
        ]
    return [] if old == new and type(old) is type(new) else [(path, _shown(old), _shown(new))]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _parse_yaml(text: str | bytes, source: str) -> Any:
    """YAML -> dicts, lists and scalars; None where there is no content."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_duplicate_keys(node, _Place(source=source), visited=set())
        return loader.construct_document(node)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{source}: not YAML: line {line}: {error.problem}. Mind quotes and indents.") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply. Write it as in docs/config.md.") from error
    except (yaml.YAMLError, ValueError) as error:  # bytes that are no text; a date that does not exist
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}. Correct or quote it.") from error


def _refuse_duplicate_keys(node: yaml.Node, place: _Place, visited: set[int]) -> None:
    """Walks the nodes, where both copies of a key still are; an alias is walked once, so a cycle ends."""
    if id(node) in visited:
        return
    visited.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _refuse_duplicate_keys(item, place.at(index), visited)
    elif isinstance(node, yaml.MappingNode):
        first: dict[str, str] = {}
        for key, value in node.value:
            name = str(key.value)
            seen = f"{value.value if value.id == 'scalar' else value.id} on line {key.start_mark.line + 1}"
            if name in first:
                raise place.at(name).error(f"given twice: {first[name]}, {seen}. Keep one of them.")
            first[name] = seen
            _refuse_duplicate_keys(value, place.at(name), visited)


def _with_override(data: dict[Any, Any], text: str, cls: Any) -> dict[Any, Any]:
    """data with the override laid over it; copies the sections on the way, since two YAML aliases are one dict."""
    source = f"override {text!r}"
    key, equals, value = text.partition("=")
    *above, last = key.split(".")
    if not equals or not all(part and part == part.strip() for part in (*above, last)):
        raise ConfigError(f"{source}: wants key=value, the key dotted. Write it like loss.clip_low=0.1.")
    result = section = dict(data)
    for depth, part in enumerate(above, start=1):
        inner = _spelt_out(section.get(part), cls, above[:depth])
        if not isinstance(inner, dict | NoneType):
            done = ".".join(above[:depth])
            raise ConfigError(f"{source}: {done} is {_shown(inner)}, not a section. Replace it whole: {done}=VALUE.")
        section[part] = dict(inner or {})
        section = section[part]
    new = _parse_yaml(value, source) if value.strip() else ""
    section[last], old = (_spelt_out(each, cls, [*above, last]) for each in (new, section.get(last)))
    if section[last] is not new and isinstance(old, dict):  # a shorthand sets its key, in whatever order overrides come
        section[last] = {**old, **section[last]}
    return result


def _spelt_out(value: Any, cls: Any, keys: list[str]) -> Any:
    """The section that plain text stands for, where the section at `keys` has a shorthand; else value as it is."""
    shorthand = _shorthand(cls, keys) if isinstance(value, str) else None
    return value if shorthand is None else {shorthand: value}


def _shorthand(cls: Any, keys: list[str]) -> str | None:
    """The key that plain text in place of the section at `keys` stands for; None where text is no section."""
    classes = [cls]
    for key in keys:
        wanted = [get_type_hints(each)[key] for each in classes if key in get_type_hints(each)]
        classes = [m for hint in wanted for m in (hint, *get_args(hint)) if dataclasses.is_dataclass(m)]
    return next((each.shorthand for each in classes[:1] if hasattr(each, "shorthand")), None)


def _section(variants: tuple[Any, ...], value: object, default: object, place: _Place) -> Any:
    """dict -> an instance of one of the dataclasses in variants; default is what the field would hold without it."""
    if isinstance(value, str) and hasattr(variants[0], "shorthand"):
        value = {variants[0].shorthand: value}
    if not isinstance(value, dict):
        came = "nothing" if value is None else _shown(value)
        raise place.error(f"wants a section, got {came}. Write keys under it: {_known_keys(*variants)}.")
    cls, values = _pick_variant(variants, value, default, place)
    annotations = get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if f.init]
    defaults = {f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory() for f in fields}
    if type(default) is cls:
        defaults = {f.name: getattr(default, f.name) for f in fields}
    typed = {name: known for name, known in defaults.items() if known is not dataclasses.MISSING}
    for key, item in values.items():
        if key not in defaults:
            advice = _suggest(key, _known_keys(cls).split(", ")) or "Remove it."
            raise place.at(str(key)).error(f"unknown key, got {_shown(item)}. {advice} Known: {_known_keys(cls)}.")
        typed[key] = _typed(annotations[key], item, defaults[key], place.at(key))
    for name in (name for name in defaults if name not in typed):
        raise place.at(name).error(f"missing; wants {_describe(annotations[name])}. Add it.")
    try:
        return cls(**typed)
    except ValueError as error:  # from __post_init__
        raise place.error(" ".join(str(error).split())) from error


def _pick_variant(variants: tuple[Any, ...], value: dict[Any, Any], default: object, place: _Place) -> tuple[Any, dict]:
    """The dataclass that the section's `type`, else its default, picks; and the section without its `type`."""
    choices = {variant.type_name: variant for variant in variants if hasattr(variant, "type_name")}
    assert len(variants) in (1, len(choices)), f"{place.path}: each of {variants} needs a type_name of its own"
    if choices and "type" in value:
        name = _typed(Literal[tuple(choices)], value["type"], dataclasses.MISSING, place.at("type"))
        return choices[name], {key: item for key, item in value.items() if key != "type"}
    if len(variants) > 1 and type(default) not in variants:
        raise place.at("type").error(f"missing; wants {_describe(Literal[tuple(choices)])}. Add it.")
    return variants[0] if len(variants) == 1 else type(default), value


def _typed(wanted: Any, value: Any, default: object, place: _Place) -> Any:
    """value, checked against the annotation `wanted`; lists become tuples and sections dataclasses."""
    members = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    if value is None and NoneType in members:
        return None
    members = tuple(member for member in members if member is not NoneType)
    if all(dataclasses.is_dataclass(member) for member in members):
        return _section(members, value, default, place)
    kind = members[0]
    assert len(members) == 1 and (kind in SCALARS or get_origin(kind) in (Literal, tuple)), f"{place.path}: {wanted}"
    if get_origin(kind) is tuple and isinstance(value, list):
        items = get_args(kind)[:1] * len(value) if Ellipsis in get_args(kind) else get_args(kind)
        if len(items) == len(value):
            return tuple(_typed(items[i], item, dataclasses.MISSING, place.at(i)) for i, item in enumerate(value))
    elif kind is float and (type(value) in (int, float) or (type(value) is str and EXPONENT.fullmatch(value))):
        number = float(str(value))  # by way of str, an integer too large for a float is inf, not an OverflowError
        if abs(number) <= LARGEST:
            return number
        if math.isfinite(number):
            raise place.error(f"wants a number up to {LARGEST:g} in size, got {_shown(value)}. Write a smaller one.")
    elif get_origin(kind) is Literal and any(type(value) is type(x) and value == x for x in get_args(kind)):
        return value
    elif kind is not float and type(value) is kind:  # not isinstance: a bool is no int here
        return value
    raise place.error(f"wants {_describe(wanted)}, got {_shown(value)}. {_way_out(kind, value)}")


def _lies_in(path: str, section: str) -> bool:
    return not section or path == section or path.startswith((f"{section}.", f"{section}["))


def _known_keys(*variants: Any) -> str:
    names = [f.name for variant in variants for f in dataclasses.fields(variant) if f.init]
    return ", ".join(dict.fromkeys(["type", *names] if hasattr(variants[0], "type_name") else names))


def _describe(wanted: Any) -> str:
    """Annotation -> what it accepts."""
    args = get_args(wanted)
    if get_origin(wanted) is Literal:
        return f"one of {', '.join(_shown(choice) for choice in args)}"
    if get_origin(wanted) is tuple:
        items = [_describe(item) for item in args if item is not Ellipsis]
        return f"a list, each {items[0]}" if Ellipsis in args else f"a list of {len(items)}: {', '.join(items)}"
    if get_origin(wanted) in (Union, UnionType):
        return " or ".join(dict.fromkeys(_describe(member) for member in args))
    return "null" if wanted is NoneType else SCALARS.get(wanted, ("a section", ""))[0]


def _way_out(kind: Any, value: object) -> str:
    """What to do about a value that is not of that kind."""
    if kind is int and type(value) is float and value.is_integer():
        return f"Write {int(value)}."
    if get_origin(kind) is Literal:
        return _suggest(value, get_args(kind)) or "Write one of them, spelt as here, quotes too."
    return SCALARS.get(kind, ("", "Write it as [...]."))[1]


def _suggest(value: object, known: Iterable[object]) -> str:
    close = difflib.get_close_matches(str(value), [str(choice) for choice in known], n=1)
    return f"Did you mean {close[0]}?" if close else ""


def _shown(value: object) -> str:
    """value nearly as YAML spells it, on one line that does not fill the screen."""
    text = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
