"""A file under octavo/ imports its own floor or a lower one, stays short, and needs no optional package to load."""

import ast
from pathlib import Path, PurePosixPath

import pytest

REPO = Path(__file__).resolve().parents[1]

FLOORS = (
    "numerics",
    "kernels",
    "layers",
    "models",
    "rollout",
    "tasks",
    "rl",
    "trainer",
    "report",
    "diagnose",
    "generate",
    "bench",
    "check",
    "plugins",
    "cli",
)  # upwards
OPTIONAL_PACKAGES = {"datasets", "pyarrow", "vllm", "verl", "ray", "triton", "torchao"}
MAX_LINES = 400

SOURCES = {path.relative_to(REPO).as_posix(): path for path in sorted((REPO / "octavo").rglob("*.py"))}


def floor_of(module: str) -> str | None:
    """octavo.rl.losses -> rl; None for the package itself, which lies below every floor, and for other packages."""
    root, _, rest = module.partition(".")
    return rest.partition(".")[0] or None if root == "octavo" else None


def module_of(path: str) -> str:
    """octavo/rl/losses.py -> octavo.rl.losses; octavo/rl/__init__.py -> octavo.rl."""
    return ".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(node: ast.AST, path: str) -> list[str]:
    """The modules that one statement or call imports, absolute; [] where it imports none."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if node.level:
            package = PurePosixPath(path).parent.parts  # the same for a module and for its package's __init__
            module = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
        if module != "octavo":
            return [module]
        names = [alias.name for alias in node.names]  # a floor, or something that octavo/__init__.py defines
        return [f"octavo.{name}" if name in FLOORS else "octavo" for name in names]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
        called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        first = node.args[0] if node.args else None
        if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
            return [str(first.value)]
    return []


def runs_on_import(tree: ast.Module) -> list[ast.AST]:
    """The nodes of a module that run whenever it is imported: those outside functions and outside `if`."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.If):
                found.append(child)
                waiting.append(child)
    return found


def violations(source: str, path: str) -> list[str]:
    """What in this source breaks the rules of the layout, a line each; path is as in octavo/rl/losses.py."""
    tree = ast.parse(source)
    floor = floor_of(module_of(path))
    if floor is not None and floor not in FLOORS:
        return [f"{path}: {floor} is on no floor; known from the bottom up: {', '.join(FLOORS)}"]
    height = -1 if floor is None else FLOORS.index(floor)
    found = []
    for node in ast.walk(tree):
        for module in imported_modules(node, path):
            target = floor_of(module)
            if target is None or target == floor:
                continue
            where = f"{path}:{node.lineno} imports {module}"
            if target not in FLOORS:
                found.append(f"{where}, which is on no floor")
            elif target == "plugins" and floor != "cli":
                found.append(f"{where}: nothing but the command line imports plugins")
            elif FLOORS.index(target) > height:
                found.append(f"{where}, which is above {floor or 'the package itself'}")
    for node in runs_on_import(tree) if floor != "plugins" else ():
        for module in imported_modules(node, path):
            package = module.partition(".")[0]
            if package in OPTIONAL_PACKAGES:
                found.append(f"{path}:{node.lineno} imports {package}, which may be absent: do so in a function")
    num_lines = len(source.splitlines())
    if num_lines > MAX_LINES:
        found.append(f"{path} has {num_lines} lines; at most {MAX_LINES}")
    return found


@pytest.mark.parametrize("path", SOURCES)
def test_file_keeps_to_its_floor(path):
    found = violations(SOURCES[path].read_text(encoding="utf-8"), path)
    assert not found, "\n".join(found)


def test_every_floor_is_looked_at():
    assert "octavo/__init__.py" in SOURCES
    assert any(path.startswith("octavo/trainer/") for path in SOURCES)


@pytest.mark.parametrize(
    "path, source, expected",
    [
        ("octavo/rl/losses.py", "import octavo.trainer.loop", "imports octavo.trainer.loop, which is above rl"),
        ("octavo/rl/losses.py", "from octavo.trainer import loop", "imports octavo.trainer, which is above rl"),
        ("octavo/rl/losses.py", "from octavo import trainer", "imports octavo.trainer, which is above rl"),
        ("octavo/rl/losses.py", "from ..trainer import loop", "imports octavo.trainer, which is above rl"),
        ("octavo/rl/losses.py", "from .. import trainer", "imports octavo.trainer, which is above rl"),
        ("octavo/rl/__init__.py", "from ..trainer.loop import run", "imports octavo.trainer.loop, which is above rl"),
        ("octavo/rl/deep/a.py", "from ...trainer import loop", "imports octavo.trainer, which is above rl"),
        ("octavo/rl/losses.py", "def f():\n    import octavo.cli", "imports octavo.cli, which is above rl"),
        ("octavo/rl/losses.py", "if TYPE_CHECKING:\n    import octavo.cli", "imports octavo.cli, which is above rl"),
        ("octavo/rl/losses.py", "importlib.import_module('octavo.cli')", "imports octavo.cli, which is above rl"),
        ("octavo/numerics/fp8.py", "import octavo.kernels.cast", "octavo.kernels.cast, which is above numerics"),
        ("octavo/__init__.py", "from .numerics import fp8", "octavo.numerics, which is above the package itself"),
        ("octavo/trainer/run.py", "import octavo.plugins.verl", "octavo.plugins.verl: nothing but the command line"),
        ("octavo/check/rows.py", "def f():\n    from ..plugins import vllm", "plugins: nothing but the command line"),
        ("octavo/cli.py", "import octavo.misc", "imports octavo.misc, which is on no floor"),
        ("octavo/misc.py", "", "misc is on no floor; known from the bottom up: numerics, kernels, layers, "),
        ("octavo/tasks/hub.py", "import datasets", "octavo/tasks/hub.py:1 imports datasets, which may be absent"),
        ("octavo/kernels/cast.py", "x = 1\nfrom triton import language", "octavo/kernels/cast.py:2 imports triton"),
        ("octavo/kernels/cast.py", "try:\n    import ray.util\nexcept ImportError:\n    pass", ":2 imports ray"),
        ("octavo/rl/losses.py", "x = 1\n" * 401, "octavo/rl/losses.py has 401 lines; at most 400"),
    ],
)
def test_the_check_sees_a_violation(path, source, expected):
    found = violations(source, path)
    assert len(found) == 1 and expected in found[0], found


@pytest.mark.parametrize(
    "path, source",
    [
        ("octavo/rl/losses.py", "import torch\nimport octavo\nfrom octavo import __version__\nfrom . import batch"),
        (
            "octavo/rl/losses.py",
            "from octavo.numerics import fp8\nfrom ..tasks import problem\nfrom .batch import pack",
        ),
        ("octavo/cli.py", "from octavo.trainer.loop import train\nfrom . import rl"),
        ("octavo/plugins/verl.py", "import verl\nfrom octavo.plugins import vllm\nfrom octavo.trainer import loop"),
        ("octavo/cli.py", "def f():\n    from .plugins import vllm"),
        ("octavo/tasks/hub.py", "def load():\n    import datasets"),
        ("octavo/kernels/cast.py", "if HAS_TRITON:\n    import triton"),
        ("octavo/tasks/datasets.py", "from octavo.tasks.datasets import load\nfrom .datasets import load"),
        ("octavo/rl/losses.py", "x = 1\n" * 400),
    ],
)
def test_the_check_lets_what_is_allowed_pass(path, source):
    assert violations(source, path) == []
