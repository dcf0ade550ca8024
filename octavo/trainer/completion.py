"""Shell completion of config files and of their keys.

A shell waits for it at every press of the tab key, so the config classes are read as text: importing them loads torch.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path


def complete_config(incomplete: str) -> list[str]:
    """Folders and YAML files that begin so."""
    folder, _, start = incomplete.rpartition("/")
    base = f"{folder}/" if "/" in incomplete else ""
    found = []
    for path in sorted(Path(base or ".").glob(f"{start}*")):
        if path.is_dir() and (start or not path.name.startswith(".")):
            found.append(f"{base}{path.name}/")
        elif path.suffix in (".yaml", ".yml"):
            found.append(f"{base}{path.name}")
    return found


def complete_override(incomplete: str) -> list[tuple[str, str]]:
    """`key=` of every key that begins so, with the text under its field."""
    return [(f"{key}=", doc) for key, doc in config_keys().items() if key.startswith(incomplete)]


def config_keys() -> dict[str, str]:
    """Dotted key -> first line of its text, of every key of TrainConfig that is no section."""
    return dict(_keys("octavo.trainer.config", "TrainConfig", ""))


def _keys(module: str, name: str, prefix: str) -> Iterator[tuple[str, str]]:
    definition = _definition(module, name)
    assert definition is not None, f"{module} has no class {name}"
    for base in (node.id for node in definition.bases if isinstance(node, ast.Name)):
        if (owner := _owner(module, base)) is not None:
            yield from _keys(owner, base, prefix)
    body = definition.body
    for index, node in enumerate(body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        names = {part.id for part in ast.walk(node.annotation) if isinstance(part, ast.Name)}
        if "ClassVar" in names:
            if node.target.id == "type_name":
                yield f"{prefix}type", "Which variant of the section."
            continue
        parts = [] if "tuple" in names else sorted(names)  # the items of a list have no keys of their own here
        inner = [(owner, part) for part in parts if (owner := _owner(module, part)) is not None]
        for owner, part in inner:
            yield from _keys(owner, part, f"{prefix}{node.target.id}.")
        if not inner:
            below = ast.unparse(body[index + 1]) if index + 1 < len(body) else ""
            doc = ast.literal_eval(below) if below[:1] in ("'", '"') else ""
            yield f"{prefix}{node.target.id}", doc.partition("\n")[0]


def _owner(module: str, name: str) -> str | None:
    """The module of octavo that defines a class of this name, as seen from `module`."""
    if _definition(module, name) is not None:
        return module
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("octavo."):
            if any(alias.name == name for alias in node.names) and _definition(str(node.module), name) is not None:
                return node.module
    return None


def _definition(module: str, name: str) -> ast.ClassDef | None:
    classes = (node for node in _tree(module).body if isinstance(node, ast.ClassDef) and node.name == name)
    return next(classes, None)


@cache
def _tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
