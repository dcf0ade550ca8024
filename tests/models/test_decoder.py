"""The decoder against transformers: logits, gradients; and which of its bytes follow the masters."""

import copy
import weakref

import pytest
import torch
from tiny_models import (
    VOCAB,
    disturb_,
    lay_end_to_end,
    masters_by_name,
    random_prompts,
    tiny_config,
    tiny_decoder,
    tiny_transformers,
)

from octavo.layers.attention import PackedAttention
from octavo.layers.linear import SCALE_STATE, FP8Linear
from octavo.models.config import decoder_config
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import RECIPE_NAMES, get_recipe

ROPE = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}

PARITY = {
    "llama": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "head_dim": 24, "tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": ROPE["linear"]}),
    "llama-llama3": ("llama", {"rope_parameters": ROPE["llama3"], "hidden_size": 192, "num_attention_heads": 6}),
    "llama-yarn": ("llama", {"rope_parameters": ROPE["yarn"]}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1, "num_hidden_layers": 1, "rms_norm_eps": 1e-3}),
    "qwen2": ("qwen2", {"rope_parameters": ROPE["theta"]}),
    "qwen2-tied-wide-heads": ("qwen2", {"tie_word_embeddings": True, "head_dim": 40, "intermediate_size": 256}),
    "qwen2-yarn-mha": ("qwen2", {"rope_parameters": ROPE["yarn"], "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {"rope_parameters": ROPE["theta"]}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 6}),
    "qwen3-kv-192": ("qwen3", {"hidden_size": 192, "num_attention_heads": 12, "num_key_value_heads": 6}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": ROPE["yarn"], "num_hidden_layers": 3, "head_dim": 16}),
}
SEQUENCES = [random_prompts(seed, 1, length, length)[0] for seed, length in enumerate((37, 1, 130, 65, 2))]


def packed_hidden(decoder, sequences, *, shadow=False):
    tokens, positions, cu_seqlens = lay_end_to_end(sequences)
    kv_format = decoder.recipe.high_precision if shadow else decoder.recipe.kv_cache
    return decoder(tokens, positions, PackedAttention(cu_seqlens, kv_format), shadow=shadow)


@torch.no_grad()
def packed_logits(decoder, sequences, *, shadow=False):
    return decoder.logits(packed_hidden(decoder, sequences, shadow=shadow))


def relative_error(x, reference):
    return ((x - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("name", PARITY)
def test_logits_of_a_packed_batch_equal_transformers(name):
    family, changes = PARITY[name]
    config = tiny_config(family, **changes)
    reference = tiny_transformers(config, seed=len(name))
    decoder = tiny_decoder(config, get_recipe("fp32"), reference)
    with torch.no_grad():
        wanted = torch.cat([reference(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES])
    logits = packed_logits(decoder, SEQUENCES)
    error = (logits - wanted).abs().max().item()
    print(f"largest error {error:.2e}, largest logit {wanted.abs().max():.2f}, std {wanted.std():.2f}")
    assert logits.dtype == torch.float32
    assert 0.7 < wanted.std() < 3.0, "the model must have something to say, and not too loudly for an absolute bound"
    assert error < 1e-5


@pytest.mark.parametrize("name", PARITY)
def test_gradient_of_every_master_equals_autograd_of_transformers(name):
    family, changes = PARITY[name]
    config = tiny_config(family, **changes)
    reference = tiny_transformers(config, seed=len(name))
    decoder = tiny_decoder(config, get_recipe("fp32"), reference)
    sequences = [sequence for sequence in SEQUENCES if len(sequence) > 1]
    temperature = 0.7

    wanted = []
    for sequence in sequences:
        logits = reference(torch.tensor([sequence])).logits[0, :-1] / temperature
        chosen = torch.tensor(sequence[1:])
        wanted.append(logits.log_softmax(dim=-1).gather(1, chosen[:, None]).squeeze(1))
    wanted = torch.cat(wanted)
    wanted.mean().backward()

    tokens, positions, _ = lay_end_to_end(sequences)
    predicted = (positions > 0).nonzero().squeeze(1)
    hidden = packed_hidden(decoder, sequences)
    logprobs, _ = decoder.logprobs(hidden[predicted - 1], tokens[predicted], temperature)
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=2e-5)
    logprobs.mean().backward()

    gradients = masters_by_name(decoder, gradients=True)
    errors = {}
    for key, parameter in reference.named_parameters():
        assert parameter.grad.norm() > 1e-5, f"{key} has no gradient to compare with"
        errors[key] = relative_error(gradients.pop(key), parameter.grad)
    assert not gradients, f"masters that transformers does not have: {list(gradients)}"
    worst = max(errors, key=errors.get)
    print(f"worst relative error {errors[worst]:.2e} of {worst}")
    assert errors[worst] < 2e-5, errors


def test_parity_sees_a_single_wrong_weight():
    config = tiny_config("qwen3")
    reference = tiny_transformers(config)
    decoder = tiny_decoder(config, get_recipe("fp32"), reference)
    before = packed_logits(decoder, SEQUENCES)
    with torch.no_grad():
        masters_by_name(decoder)["model.layers.1.self_attn.k_norm.weight"][3] += 0.01
    decoder.requantize_()
    assert (packed_logits(decoder, SEQUENCES) - before).abs().max() > 1e-4


def test_entropy_and_logprobs_are_those_of_the_softmax():
    decoder = tiny_decoder(tiny_config("llama"), get_recipe("fp32"))
    with torch.no_grad():
        hidden = packed_hidden(decoder, SEQUENCES)
        tokens, _, _ = lay_end_to_end(SEQUENCES)
        logprobs, entropy = decoder.logprobs(hidden, tokens, 0.6)
        wanted = (decoder.logits(hidden).double() / 0.6).log_softmax(dim=-1)
    torch.testing.assert_close(logprobs.double(), wanted.gather(1, tokens[:, None]).squeeze(1), rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy.double(), -(wanted.exp() * wanted).sum(dim=-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(decoder.logits(hidden, 0.6), decoder.logits(hidden) / 0.6, rtol=1e-6, atol=0)


@pytest.mark.parametrize("recipe", ["bf16", "block128", "w8a16"])
def test_low_precision_stays_near_fp32_and_is_not_it(recipe):
    # BF16 keeps 8 bits, E4M3 keeps 4: two layers of either may disturb logits of std 1 by a few of their roundings.
    config = tiny_config("qwen3")
    exact = packed_logits(tiny_decoder(config, get_recipe("fp32")), SEQUENCES)
    error = relative_error(packed_logits(tiny_decoder(config, get_recipe(recipe)), SEQUENCES), exact)
    low, high = {"bf16": (1e-3, 2e-2), "block128": (2e-2, 0.2), "w8a16": (2e-2, 0.15)}[recipe]
    print(f"{recipe}: relative error {error:.4f}")
    assert low < error < high


@pytest.mark.parametrize("recipe", [name for name in RECIPE_NAMES if name != "fp32"])
def test_shadow_is_the_bf16_decoder_of_the_same_masters(recipe):
    config = tiny_config("qwen2")
    decoder = tiny_decoder(config, get_recipe(recipe))
    shadow = packed_logits(decoder, SEQUENCES, shadow=True)
    assert torch.equal(shadow, packed_logits(tiny_decoder(config, get_recipe("bf16")), SEQUENCES))
    assert torch.equal(shadow, packed_logits(decoder, SEQUENCES)) == (recipe == "bf16")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "block128", "rowwise", "w8a16"])
def test_forward_follows_the_masters_at_requantize_and_not_before(recipe, tied):
    config = tiny_config("qwen2", tie_word_embeddings=tied, num_hidden_layers=1)
    decoder = tiny_decoder(config, get_recipe(recipe))
    sequences = SEQUENCES[:2]
    before = packed_logits(decoder, sequences)
    for name, master in masters_by_name(decoder).items():
        if "norm" in name:
            continue  # gains are read in FP32 as they are
        kept = master.clone()
        master.mul_(1.5)
        assert torch.equal(packed_logits(decoder, sequences), before), f"{name}: read before requantize_"
        decoder.requantize_()
        assert not torch.equal(packed_logits(decoder, sequences), before), f"{name}: not read after requantize_"
        master.copy_(kept)
        decoder.requantize_()
        assert torch.equal(packed_logits(decoder, sequences), before), f"{name}: something else stayed"


def test_requantize_writes_in_place():
    decoder = tiny_decoder(tiny_config("qwen2"), get_recipe("rowwise"))
    addresses = {name: buffer.data_ptr() for name, buffer in decoder.named_buffers()}
    old = {name: buffer.view(torch.uint8).clone() for name, buffer in decoder.named_buffers()}
    disturb_(decoder, seed=1)
    assert {name: buffer.data_ptr() for name, buffer in decoder.named_buffers()} == addresses
    for name, buffer in decoder.named_buffers():
        changed = not torch.equal(buffer.view(torch.uint8), old[name])
        assert changed == (name not in ("cos", "sin", "num_saturated")), name


def test_a_decoder_that_is_moved_keeps_nothing_where_it_was():
    decoder = tiny_decoder(tiny_config("qwen3", num_hidden_layers=1), get_recipe("block128"))
    packed_logits(decoder, SEQUENCES[:1])
    operands = decoder._head_operand(), decoder.layers[0].o_proj.weight_operand()
    kept = [weakref.ref(operand.values) for operand in operands]
    del operands
    assert all(tensor() is not None for tensor in kept)
    decoder.to("cpu")
    assert all(tensor() is None for tensor in kept)


def test_a_copied_decoder_reads_its_own_weights():
    config, recipe = tiny_config("qwen3", num_hidden_layers=1), get_recipe("block128")
    original = tiny_decoder(config, recipe)
    for seed in range(4):
        disturb_(original, seed)
    packed_logits(original, SEQUENCES[:1])  # prepares the weights
    for num_updates in range(1, 7):  # the counters of both meet somewhere
        duplicate = copy.deepcopy(original)
        for seed in range(num_updates):
            disturb_(duplicate, 10 + seed)
        fresh = tiny_decoder(config, recipe)
        fresh.load_state_dict(duplicate.state_dict())
        fresh.requantize_()
        logits = packed_logits(duplicate, SEQUENCES[:1])
        assert torch.equal(logits, packed_logits(fresh, SEQUENCES[:1])), f"stale after {num_updates} updates"
        assert not torch.equal(logits, packed_logits(original, SEQUENCES[:1]))


@pytest.mark.parametrize("pattern", ["down_proj", "model.layers.1.mlp.down_proj", "layers.1.*"])
def test_keep_bf16_keeps_what_it_names(pattern):
    keep = ("lm_head", "embed_tokens", pattern)
    decoder = tiny_decoder(tiny_config("llama"), get_recipe("block128", keep_bf16=keep))
    kept = {name for name, layer in decoder.named_modules() if isinstance(layer, FP8Linear) and not layer.quantized}
    wanted = {
        "down_proj": {"layers.0.down_proj", "layers.1.down_proj"},
        "model.layers.1.mlp.down_proj": {"layers.1.down_proj"},
        "layers.1.*": {f"layers.1.{name}" for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")},
    }[pattern]
    assert kept == wanted


@pytest.mark.parametrize("pattern", ["down", "layers.2.*", "gate_up_proj", "model.layers.0.self_attn.down_proj", ""])
def test_keep_bf16_that_names_nothing_is_refused(pattern):
    config = tiny_config("llama")
    recipe = get_recipe("block128", keep_bf16=("lm_head", "embed_tokens", pattern))
    with pytest.raises(ValueError, match=r"keep_bf16 has .* names no module"):
        Decoder(decoder_config(config), config, recipe)


def test_keep_bf16_of_a_part_of_a_fused_projection_is_refused():
    config = tiny_config("llama")
    recipe = get_recipe("block128", keep_bf16=("lm_head", "embed_tokens", "q_proj"))
    with pytest.raises(ValueError, match=r"only part of the fused projections .*model\.layers\.0\.self_attn"):
        Decoder(decoder_config(config), config, recipe)


def test_max_tokens_is_checked_against_the_positions():
    config = tiny_config("llama")
    assert Decoder(decoder_config(config), config, get_recipe("bf16")).max_tokens == 256
    assert Decoder(decoder_config(config), config, get_recipe("bf16"), max_tokens=256).cos.shape == (256, 16)
    with pytest.raises(ValueError, match=r"257 tokens were asked for, but the model has 256 positions"):
        Decoder(decoder_config(config), config, get_recipe("bf16"), max_tokens=257)


def test_the_length_of_the_rotary_table_changes_no_number():
    config = tiny_config("llama", rope_parameters=ROPE["llama3"])
    long = tiny_decoder(config, get_recipe("fp32"))
    short = Decoder(decoder_config(config), config, get_recipe("fp32"), max_tokens=130)
    short.load_state_dict(long.state_dict())
    short.requantize_()
    assert torch.equal(packed_logits(short, SEQUENCES), packed_logits(long, SEQUENCES))


def test_a_rope_type_that_follows_the_length_is_refused():
    config = tiny_config("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(ValueError, match=r"rope_type 'dynamic' is not supported"):
        Decoder(decoder_config(config), config, get_recipe("bf16"))


def test_static_activation_scales_are_frozen_only_when_asked():
    decoder = tiny_decoder(tiny_config("llama"), get_recipe("tensorwise_static"))
    packed_logits(decoder, SEQUENCES[:1])  # the first batch calibrates itself
    layer = decoder.layers[0].qkv_proj
    first = layer.activation_scale.clone()
    packed_logits(decoder, SEQUENCES)
    assert torch.equal(layer.activation_scale, first)
    largest = layer.activation_amax.clone()
    decoder.freeze_activation_scales_()
    torch.testing.assert_close(layer.activation_scale, largest * 1.25 / 448.0)
    assert largest > 0.0 and layer.activation_amax.item() == 0.0
    frozen = layer.activation_scale.clone()
    decoder.freeze_activation_scales_()  # nothing was seen in between: the scale stays
    assert torch.equal(layer.activation_scale, frozen)


@pytest.mark.parametrize("recipe", ["block128", "w8a16", "bf16", "tensorwise_static"])
def test_layers_computed_again_give_the_same_bits_and_save_less(recipe):
    found = []
    for recompute in (False, True):
        decoder = tiny_decoder(tiny_config("qwen3", num_hidden_layers=4), get_recipe(recipe))
        decoder.recompute_layers, saved = recompute, 0
        for block in decoder.blocks():
            block.q_norm.weight.data *= 1e5  # beyond FP16: counted beside FP8 keys
        decoder.requantize_()

        def count(x):
            nonlocal saved
            saved += 0 if isinstance(x, torch.nn.Parameter) else x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            packed_hidden(decoder, SEQUENCES)
        forward = saved
        hidden = packed_hidden(decoder, SEQUENCES)  # without hooks, under which torch does not see a changed tensor
        hidden.float().square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in decoder.named_parameters()}
        state = {
            name: value for name, value in decoder.named_buffers() if name.endswith((*SCALE_STATE, "num_saturated"))
        }
        found.append((hidden, gradients, state, forward))
    (plain, gradients, state, bytes_plain), (again, *others, bytes_again) = found
    assert torch.equal(plain, again) and bytes_again < bytes_plain / 5
    assert (state["num_saturated"] > 0) == (get_recipe(recipe).kv_cache == "fp8")
    for one, other in zip((gradients, state), others, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items() if value is not None)
    assert sum(value is not None for value in gradients.values()) > 20
    assert (len(state) > 1) == (recipe == "tensorwise_static")


def test_logits_need_no_neighbour():
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe("block128"))
    together = packed_logits(decoder, SEQUENCES)
    alone = torch.cat([packed_logits(decoder, [sequence]) for sequence in SEQUENCES])
    assert torch.equal(together, alone)
    assert together.shape[1] == VOCAB and together.std() > 0.3
