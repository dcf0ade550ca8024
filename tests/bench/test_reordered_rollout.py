"""benchmarks/reordered_rollout.py: the same product in another order, reached by the trainer, refused elsewhere."""

import importlib.util
from pathlib import Path

import kernel_products
import pytest
import torch
from linear_layers import make_batch, make_layer
from training_runs import tiny_config, train_quietly

from octavo.kernels.gemm import product
from octavo.trainer import train

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def reordered():
    spec = importlib.util.spec_from_file_location("reordered_rollout", REPO / "benchmarks/reordered_rollout.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("K", [384, 200])
def test_blocks_change_places_and_no_product(reordered, monkeypatch, K):
    kernel_products.as_on_gpu(monkeypatch)
    layer = make_layer("block128", {"q_proj": 192, "k_proj": 64}, in_features=K)
    x = layer.activation_operand(make_batch(layer, 5)[0])
    pair = reordered.backwards(x), reordered.backwards(layer.weight_operand())
    assert torch.equal(pair[0].values[:, :128].float(), x.values[:, -128:].float())
    y = product(x, layer.weight_operand(), dtype=torch.float32)
    torch.testing.assert_close(product(*pair, dtype=torch.float32), y, rtol=1e-5, atol=1e-6)
    assert y.abs().max() > 0.0


def test_the_trainer_loads_through_it(reordered, monkeypatch, tmp_path):
    def reached(config, display, vllm):
        raise ValueError(f"reached, {vllm}")

    monkeypatch.setattr(reordered, "load_run", reached)
    monkeypatch.setattr(train, "load_run", reordered.load_reordered)
    with pytest.raises(ValueError, match="reached, None"):
        train_quietly(tiny_config(tmp_path / "run"), tmp_path / "log")


@pytest.mark.parametrize(
    "overrides, got",
    [
        ([], "got cpu, by_device, block128 and octavo"),
        (["device=cuda", "kernels=reference"], "got cuda, reference, block128 and octavo"),
        (["device=cuda", "precision.recipe=w8a16"], "got cuda, by_device, w8a16 and octavo"),
    ],
)
def test_what_it_cannot_reorder_is_refused(reordered, monkeypatch, overrides, got):
    monkeypatch.setattr("sys.argv", ["reordered_rollout.py", str(REPO / "examples/demo.yaml"), *overrides])
    with pytest.raises(SystemExit, match=got):
        reordered.main()
