"""Which kernels start before the one ahead of them has ended: those of a decode step, and none that writes a weight."""

import pytest
import torch
from kernel_checks import REPO
from tiny_models import tiny_config, tiny_decoder

pytest.importorskip("triton", reason="the launchers are triton's")

from cuda_dry_run import pretend_cuda
from triton.runtime.jit import KernelInterface

from octavo.kernels import early_launch
from octavo.kernels.cast import cast_rows
from octavo.kernels.early_launch import MAX_EARLY_ROWS
from octavo.kernels.sampling import draw_tokens
from octavo.layers.attention import PackedAttention
from octavo.layers.linear import quantized_layers
from octavo.numerics.recipe import get_recipe

SAMPLING = {"_logits_kernel", "_row_sums_kernel", "_combine_kernel", "_draw_kernel"}
ALONE = SAMPLING | {"norm_kernel", "heads_kernel", "swiglu_kernel"}
FUSED = SAMPLING | {"norm_kernel", "heads_kernel", "norm_cast_kernel", "rows_kernel", "cast_rows_kernel"}
EARLY = {
    "block128": FUSED,
    "rowwise": FUSED,
    "tensorwise": ALONE | {"amax_kernel", "scaled_kernel"},
    "tensorwise_static": ALONE | {"scaled_kernel"},
    "w8a16": ALONE,
    "bf16": ALONE,
}


@pytest.fixture
def early(monkeypatch):
    """Names of the kernels that are launched early from here on; none runs."""
    names = set()

    def launch(kernel, options):
        if options.get("EARLY"):
            assert options["launch_pdl"]
            names.add(kernel.__name__)

    pretend_cuda(monkeypatch)
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, _: lambda *_, **options: launch(kernel, options))
    monkeypatch.setattr(early_launch, "HAS_GLUON", True)
    return names


def decoder_of(name):
    """Every weight is of few rows, as an activation of a decode step is."""
    shape = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    decoder = tiny_decoder(tiny_config("qwen3", **shape), get_recipe(name))
    for layer in quantized_layers(decoder) if decoder.recipe.static_activation_scale else ():
        layer.activation_scale.fill_(1.0)
    return decoder


@torch.no_grad()
def sample(decoder, num_tokens):
    """A token after each of these."""
    tokens, positions = torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens) % 64
    hidden = decoder(tokens, positions, PackedAttention(torch.tensor([0, num_tokens]), "fp8"))
    draw_tokens(decoder.logits(hidden), torch.zeros(1, dtype=torch.int64), tokens, positions)


@pytest.mark.parametrize("name", EARLY)
def test_kernels_of_few_tokens_start_early_and_those_of_many_do_not(name, early):
    decoder = decoder_of(name)
    sample(decoder, MAX_EARLY_ROWS + 1)
    assert not early
    sample(decoder, MAX_EARLY_ROWS)
    assert early == EARLY[name]


@pytest.mark.parametrize("name", EARLY)
def test_what_writes_a_weight_is_never_early(name, early, monkeypatch):
    """A product of decoding fetches W and its scales before it waits."""
    monkeypatch.setattr(early_launch, "MAX_EARLY_ROWS", 512)
    decoder = decoder_of(name)
    decoder.requantize_()
    for layer in quantized_layers(decoder):
        assert len(layer.weight) <= early_launch.MAX_EARLY_ROWS
        layer.weight_operand()
    assert not early


def test_only_hopper_and_a_triton_that_can(early, monkeypatch):
    x = torch.zeros(2, 16, dtype=torch.bfloat16)
    for module, name, value in (
        (early_launch, "INTERPRETED", True),
        (early_launch, "HAS_GLUON", False),
        (torch.cuda, "get_device_capability", lambda device: (8, 9)),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(module, name, value)
            cast_rows(x, activation=True)
            assert not early, name
    with early_launch.one_after_another():
        cast_rows(x, activation=True)
        assert not early
    cast_rows(x, activation=True)
    assert early == {"rows_kernel"}


def test_nothing_else_lets_the_next_kernel_start_early():
    texts = {path.name: path.read_text() for path in (REPO / "octavo").rglob("*.py")}
    found = {name for name, text in texts.items() if "gdc_launch_dependents" in text or "launch_pdl" in text}
    assert found == {"decode_attention.py", "decode_gemm.py", "early_launch.py", "spread_kernels.py"}
