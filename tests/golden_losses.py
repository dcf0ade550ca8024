"""Golden losses: 20 optimiser steps of a small decoder on the same tokens, which a change of numerics must not move.

PYTHONPATH=. python tests/golden_losses.py cpu     # writes that device's part of tests/trainer/golden_losses.json
PYTHONPATH=. python tests/golden_losses.py cuda    # likewise; to golden_losses.json under $OUT if that is set
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path

import torch
from tiny_models import lay_end_to_end, random_prompts, tiny_config, tiny_decoder

from octavo.layers.attention import PackedAttention
from octavo.numerics.recipe import get_recipe
from octavo.trainer.optimizer import Optimizer, OptimizerConfig

FILE = Path(__file__).with_name("trainer") / "golden_losses.json"
CASES = {"block128+kv8": ("block128", "fp8"), "bf16": ("bf16", "bf16")}
"""Recipe and format of the KV cache."""
TOLERANCE = {"block128+kv8": 0.04, "bf16": 0.004}
"""Nats, on another device or with other versions: over twice what noise of 1e-4 in the first weights changes. The two
cases lie up to 0.10 apart."""
NUM_STEPS = 20
LENGTHS = (20, 33, 40, 47, 51, 55, 64, 74)
"""Tokens of each sequence, 384 in all: a multiple of 128, as `packed_logprobs` makes every batch on a GPU."""
VOCAB = 512
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def curves(case: str, device: str) -> dict[str, list[float]]:
    """Mean negative log-probability in nats, and the gradient's norm, of each step."""
    recipe, kv_cache = CASES[case]
    decoder = tiny_decoder(tiny_config("qwen3", **SHAPE), get_recipe(recipe, kv_cache=kv_cache), 0).to(device)
    optimizer = Optimizer(dict(decoder.named_parameters()), OptimizerConfig(lr=3e-4), NUM_STEPS, fused=device == "cuda")
    sequences = [random_prompts(length, 1, length, length, VOCAB)[0] for length in LENGTHS]
    tokens, positions, boundaries = (x.to(device) for x in lay_end_to_end(sequences))
    last = boundaries[1:] - 1
    predicts = torch.ones(len(tokens), dtype=torch.bool, device=device).index_fill_(0, last, False).nonzero().squeeze(1)
    found: dict[str, list[float]] = {"losses": [], "grad_norms": []}
    for _ in range(NUM_STEPS):
        hidden = decoder(tokens, positions, PackedAttention(boundaries, kv_cache))
        loss = -decoder.logprobs(hidden[predicts], tokens[predicts + 1], 1.0)[0].mean()
        loss.backward()
        found["losses"].append(loss.item())
        found["grad_norms"].append(optimizer.step()["optimizer/grad_norm"])
        decoder.requantize_()
    return found


def difference(case: str, device: str, found: dict[str, list[float]], kept: dict, here: dict[str, str]) -> str:
    """Why the curves found are not the golden ones; empty where they are.

    On the device and versions that wrote them, every bit; elsewhere each loss within TOLERANCE of the case.
    """
    name = f"{device}/{case}"
    command = f"PYTHONPATH=. python tests/golden_losses.py {device}"
    if name not in kept:
        return f"{FILE.name} has no {name}. Write it on a {device} device: {command}"
    golden = kept[name]
    changed = [f"{key} {was} -> {here[key]}" for key, was in golden["environment"].items() if was != here[key]]
    allowed, curves_compared = (TOLERANCE[case], ["losses"]) if changed else (0.0, ["losses", "grad_norms"])
    for curve in curves_compared:
        pairs = list(zip(found[curve], golden[curve], strict=True))
        wrong = [step for step, (mine, wanted) in enumerate(pairs) if not abs(mine - wanted) <= allowed]
        if wrong:
            mine, wanted = pairs[wrong[0]]
            return (
                f"{name}: {curve} differs by more than {allowed} from step {wrong[0]} on ({len(wrong)} of {len(pairs)} "
                f"steps): {mine!r}, golden {wanted!r}; environment: {'; '.join(changed) or 'the same'}. If that is "
                f"meant, say why in LOG.md, with the curve, and write it anew: {command}"
            )
    return ""


def environment(device: str) -> dict[str, str]:
    """What the bits depend on besides the code."""
    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "none"
    if device == "cuda":
        return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton}
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    fields = dict(line.replace("\t", "").split(":", 1) for line in lines if line.startswith(("model", "CPU part")))
    processor = ", ".join(f"{key}{value}" for key, value in sorted(fields.items()))
    name = f"{processor}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return {"device": name, "torch": torch.__version__}


def golden() -> dict:
    """What is kept; nothing where there is no file."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def main(device: str) -> None:
    """Write the cases of a device beside those of the other."""
    torch.set_num_threads(1)
    cases = golden()
    for case in CASES:
        cases[f"{device}/{case}"] = {"environment": environment(device), **curves(case, device)}
        print(f"{device}/{case}: {cases[f'{device}/{case}']['losses']}", flush=True)
    path = Path(os.environ["OUT"]) / FILE.name if "OUT" in os.environ else FILE
    path.write_text(json.dumps(cases, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("cpu", "cuda"):
        sys.exit(__doc__)
    main(sys.argv[1])
