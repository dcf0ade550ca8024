"""Learning-rate schedules by hand, AdamW's first step by hand, clipping and non-finite gradients."""

import math

import pytest
import torch

from octavo.trainer.divergence import Diverged
from octavo.trainer.optimizer import Optimizer, OptimizerConfig


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + math.sqrt(2) / 4, 0.5, 0.5 - math.sqrt(2) / 4]),
    ],
)
def test_schedules_after_two_warmup_steps_of_six(schedule, expected):
    config = OptimizerConfig(lr=1.0, lr_schedule=schedule, warmup_steps=2)
    assert [config.lr_at(update, 6) for update in range(6)] == pytest.approx(expected)


def test_first_step_moves_by_lr_and_decays_matrices_only():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = Optimizer(
        {"matrix": matrix, "vector": vector}, OptimizerConfig(lr=0.1, weight_decay=0.5, max_grad_norm=100.0), 1
    )
    matrix.grad, vector.grad = torch.full((2, 2), 3.0), torch.full((2,), -4.0)
    metrics = optimizer.step()
    # Adam's first step is lr * sign(gradient); the matrix first decays by 1 - 0.1 * 0.5.
    assert torch.allclose(matrix, torch.full((2, 2), 0.85)) and torch.allclose(vector, torch.full((2,), 1.1))
    assert metrics["optimizer/grad_norm"] == pytest.approx(math.sqrt(4 * 9 + 2 * 16))
    assert optimizer.update == 1 and matrix.grad is None


@pytest.mark.parametrize("resumed", [False, True])
def test_the_fused_kernel_computes_the_same_updates(resumed):
    found = []
    for fused in (False, True):
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(300, 7, generator=generator))
        optimizer = Optimizer({"weight": weight}, OptimizerConfig(lr=0.1, weight_decay=0.1), 3, fused=fused)
        if resumed:  # moments made before the first update, as a checkpoint's are read into
            moments = optimizer.moments()
            moments["weight.exp_avg"].fill_(0.01)
            moments["weight.exp_avg_sq"].fill_(0.001)
            moments["weight.step"].fill_(5.0)
        for _ in range(3):
            weight.grad = torch.randn(300, 7, generator=generator)
            optimizer.step()
        assert optimizer.moments()["weight.step"] == (8.0 if resumed else 3.0)
        found.append(weight.detach())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_gradients_are_scaled_to_the_largest_norm():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = Optimizer({"weight": weight}, OptimizerConfig(lr=1.0, max_grad_norm=1.0, adam_eps=1.0), 1)
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    # Clipped to (0.6, 0.8); Adam's first step is -lr * g / (|g| + adam_eps).
    assert torch.allclose(weight, torch.tensor([-0.6 / 1.6, -0.8 / 1.8]))


def trained(max_grad_norm, scale, **formats):
    """A matrix and a vector after two steps on gradients of which the optimiser makes the same."""
    generator = torch.Generator().manual_seed(0)
    matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 256), (256,)))
    config = OptimizerConfig(lr=0.1, adam_eps=1.0, max_grad_norm=max_grad_norm, **formats)
    optimizer = Optimizer({"matrix": matrix, "vector": vector}, config, 2, seed=3)
    for _ in range(2):
        for weight in (matrix, vector):
            grad = torch.randn(weight.shape, generator=generator)
            weight.grad = grad / grad.norm() * 2.0**-0.5 * scale  # of norm `scale` together
        optimizer.step()
    return matrix.detach(), vector.detach()


@pytest.mark.parametrize("formats", [{}, {"state_format": "int8"}])
def test_in_any_format_clipping_changes_matrices_and_vectors_alike(formats):
    clipped, small = trained(0.5, 64.0, **formats), trained(1e9, 0.5, **formats)
    for mine, wanted in zip(clipped, small, strict=True):
        torch.testing.assert_close(mine - 1.0, wanted - 1.0, rtol=0.02, atol=1e-7)
        assert (wanted != 1.0).all()


@pytest.mark.parametrize("broken", ["matrix", "vector"])
@pytest.mark.parametrize("formats", [{}, {"state_format": "int8"}, {"master_format": "bf16"}])
def test_a_master_that_is_no_longer_finite_is_named(formats, broken):
    """The step takes it beyond FP32."""
    weights = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in (("matrix", (4, 256)), ("vector", 256))}
    with torch.no_grad():
        weights[broken].view(-1)[77] = 3.3e38
    if formats.get("master_format") == "bf16":
        weights["matrix"] = torch.nn.Parameter(weights["matrix"].detach().bfloat16())
        weights["matrix"].grad_dtype = torch.float32
    optimizer = Optimizer(weights, OptimizerConfig(lr=3e37, **formats), 1)
    for weight in weights.values():
        weight.grad = torch.zeros(weight.shape)
    weights[broken].grad.view(-1)[77] = -1.0
    with pytest.raises(
        Diverged, match="weight after optimiser step 0 is not finite; the first of 1 tensors is"
    ) as error:
        optimizer.step()
    assert [item.name for item in error.value.broken] == [broken]


def test_a_gradient_that_is_not_finite_stops_before_any_weight_changes():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Optimizer({"weight": weight}, OptimizerConfig(), 1)
    weight.grad = torch.tensor([math.nan, 1.0])
    with pytest.raises(
        Diverged, match="gradient of optimiser step 0 is not finite; the first of 1 tensors is weight"
    ) as e:
        optimizer.step()
    (broken,) = e.value.broken
    assert (broken.num_nan, broken.num_inf, broken.finite_amax) == (1, 0, 1.0)
    assert torch.equal(weight, torch.ones(2)) and optimizer.update == 0


def test_a_norm_that_overflows_names_the_largest_gradient():
    weights = {name: torch.nn.Parameter(torch.ones(2)) for name in ("small", "large")}
    optimizer = Optimizer(weights, OptimizerConfig(), 1)
    weights["small"].grad, weights["large"].grad = torch.ones(2), torch.tensor([1.0, -3e30])
    with pytest.raises(Diverged, match="is not finite; each of 2 tensors is, the largest value is 3e.30 in large") as e:
        optimizer.step()
    assert e.value.broken == [] and torch.equal(weights["large"], torch.ones(2))


@pytest.mark.parametrize("key, value", [("lr", -1.0), ("beta1", 1.0), ("max_grad_norm", 0.0), ("warmup_steps", -1)])
def test_bad_values_are_named(key, value):
    with pytest.raises(ValueError, match=f"{key}.*{value}"):
        OptimizerConfig(**{key: value})
