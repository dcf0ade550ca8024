"""Single functions of other frameworks, run from their source without what those files import.

PEERS names a folder that holds `verl` (0.9.1) and `trl` (1.16.0); where it is missing, tests that need it are skipped.
"""

import ast
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

PEERS = Path(os.environ.get("PEERS", "/tmp/peers"))
CORE_ALGOS = "verl/verl/trainer/ppo/core_algos.py"
ROLLOUT_CORRECTION = "verl/verl/trainer/ppo/rollout_corr_helper.py"
TORCH_FUNCTIONAL = "verl/verl/utils/torch_functional.py"


def functions_of(file: str, names: list[str], **known: Any) -> SimpleNamespace:
    """The named functions and classes of a file, without decorators and annotations; `known` are names they use."""
    path = PEERS / file
    if not path.is_file():
        pytest.skip(f"{path} is not there; PEERS names the folder that holds verl and trl")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names]
    for node in [inner for top in found for inner in ast.walk(top)]:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list, node.returns = [], None
        if isinstance(node, ast.arg):
            node.annotation = None
    namespace = {"torch": torch, "np": np, **known}
    exec(compile(ast.Module(body=found, type_ignores=[]), str(path), "exec"), namespace)
    return SimpleNamespace(**{name: namespace[name] for name in names})


class VerlConfig(dict):
    """What verl's losses read of their config."""

    global_batch_info: dict = {}

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


def verl_losses(*names: str) -> SimpleNamespace:
    """Policy losses of verl's core_algos, with the reduction they call."""
    masked = functions_of(TORCH_FUNCTIONAL, ["masked_sum", "masked_mean", "masked_var", "masked_whiten"])
    agg_loss = functions_of(CORE_ALGOS, ["agg_loss"], verl_F=masked).agg_loss
    classes = {"ActorConfig": VerlConfig, "AlgoConfig": str}
    return functions_of(CORE_ALGOS, list(names), verl_F=masked, agg_loss=agg_loss, **classes)
