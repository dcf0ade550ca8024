"""Hugging Face folders: what is written loads in transformers, what is read comes back, what is damaged is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import (
    lay_end_to_end,
    masters_by_name,
    random_prompts,
    tiny_config,
    tiny_decoder,
    tiny_transformers,
)
from transformers import AutoModelForCausalLM

from octavo.kernels.gemm import quantize_matrix
from octavo.layers.attention import PackedAttention
from octavo.models import checkpoint
from octavo.models.checkpoint import dither_masters_, load_decoder, save_decoder
from octavo.models.decoder import Decoder
from octavo.numerics.fp8 import BLOCK_128X128, E4M3
from octavo.numerics.recipe import get_recipe

FAMILIES = [("llama", False), ("llama", True), ("qwen2", False), ("qwen2", True), ("qwen3", False), ("qwen3", True)]
TOKENIZER_FILES = {
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": "{}",
    "special_tokens_map.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"eos_token_id": [1, 2]}',
    "vocab.json": "{}",
    "merges.txt": "a b",
}


@pytest.fixture
def make_folder(tmp_path):
    """A folder with a tiny model in it, as transformers writes it, and the model."""

    def make(name="source", family="qwen3", dtype=torch.bfloat16, **changes):
        model = tiny_transformers(tiny_config(family, **changes)).to(dtype)
        model.save_pretrained(tmp_path / name)
        for file, text in TOKENIZER_FILES.items():
            (tmp_path / name / file).write_text(text)
        (tmp_path / name / "README.md").write_text("not to be kept")
        return tmp_path / name, model

    return make


def read_folder(folder):
    """Every tensor of a folder, whatever its shards."""
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def same_bytes(a, b):
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].shape == b[name].shape, name
        x, y = (t[name].contiguous().view(torch.uint8) for t in (a, b))
        assert torch.equal(x, y), f"{name}: {(x != y).sum()} bytes differ"


@torch.no_grad()
def logits_of(decoder, tokens):
    tokens, positions, cu_seqlens = lay_end_to_end([tokens])
    return decoder.logits(decoder(tokens, positions, PackedAttention(cu_seqlens, decoder.recipe.kv_cache)))


@pytest.mark.parametrize("family, tied", FAMILIES)
def test_masters_are_the_tensors_on_disk(make_folder, family, tied):
    folder, model = make_folder(family=family, tie_word_embeddings=tied)
    masters = masters_by_name(load_decoder(folder, get_recipe("block128")))
    wanted = dict(model.named_parameters())
    assert masters.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert masters[name].dtype == torch.float32
        assert torch.equal(masters[name], tensor.detach().float()), name


@pytest.mark.parametrize("family, tied", FAMILIES)
def test_load_then_save_gives_the_same_bytes_back(make_folder, tmp_path, family, tied):
    folder, _ = make_folder(family=family, tie_word_embeddings=tied)
    save_decoder(load_decoder(folder, get_recipe("block128")), tmp_path / "out", folder)
    same_bytes(read_folder(tmp_path / "out"), read_folder(folder))
    save_decoder(load_decoder(tmp_path / "out", get_recipe("rowwise")), tmp_path / "again", tmp_path / "out")
    same_bytes(read_folder(tmp_path / "again"), read_folder(folder))
    assert ("lm_head.weight" in read_folder(folder)) == (not tied)
    original, saved = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, tmp_path / "again"))
    assert saved.dtype == original.dtype == torch.bfloat16
    tokens = torch.tensor(random_prompts(0, 2, 30, 30))
    with torch.no_grad():
        assert torch.equal(saved(tokens).logits, original(tokens).logits)


@pytest.mark.parametrize("family, tied", [("llama", True), ("qwen2", False), ("qwen3", False)])
def test_transformers_gives_the_decoders_logits_after_saving(make_folder, tmp_path, family, tied):
    folder, _ = make_folder(family=family, tie_word_embeddings=tied)
    decoder = load_decoder(folder, get_recipe("fp32"))
    for name, master in masters_by_name(decoder).items():
        master.mul_(1.0 + 0.1 * torch.randn(master.shape)) if "norm" not in name else master.add_(0.01)
    decoder.requantize_()
    save_decoder(decoder, tmp_path / "out", folder)
    assert {x.dtype for x in read_folder(tmp_path / "out").values()} == {torch.float32}
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = random_prompts(0, 1, 50, 50)[0]
    with torch.no_grad():
        difference = logits_of(decoder, tokens) - saved(torch.tensor([tokens])).logits[0]
    assert saved.dtype == torch.float32
    assert difference.abs().max() < 1e-5
    reloaded = load_decoder(tmp_path / "out", get_recipe("fp32"))
    assert torch.equal(logits_of(reloaded, tokens), logits_of(decoder, tokens))


def test_masters_are_rounded_to_nearest_bf16(make_folder, tmp_path):
    folder, _ = make_folder()
    decoder = load_decoder(folder, get_recipe("block128"))
    masters = masters_by_name(decoder)
    for master in masters.values():
        master.mul_(1.0 + 2.0**-7 * torch.rand(master.shape))
    save_decoder(decoder, tmp_path / "out", folder)
    same_bytes(read_folder(tmp_path / "out"), {name: master.bfloat16() for name, master in masters.items()})


@pytest.mark.parametrize("recipe, dtype", [("block128", torch.bfloat16), ("fp32", torch.float32)])
def test_shards_hold_the_same_bytes(make_folder, tmp_path, recipe, dtype):
    folder, _ = make_folder(family="qwen2", dtype=dtype)
    decoder = load_decoder(folder, get_recipe(recipe))
    save_decoder(decoder, tmp_path / "sharded", folder, max_shard_size="60KB")
    files = sorted((tmp_path / "sharded").glob("*.safetensors"))
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert index["weight_map"].keys() == read_folder(folder).keys()
    same_bytes(read_folder(tmp_path / "sharded"), read_folder(folder))
    tokens = random_prompts(0, 1, 30, 30)[0]
    reloaded = load_decoder(tmp_path / "sharded", get_recipe(recipe))
    assert torch.equal(logits_of(reloaded, tokens), logits_of(decoder, tokens))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded")
    same_bytes(dict(saved.state_dict()), read_folder(folder))


def test_tokenizer_and_generation_config_go_along_and_nothing_else(make_folder, tmp_path):
    folder, _ = make_folder()
    save_decoder(load_decoder(folder, get_recipe("bf16")), tmp_path / "out", folder)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {*TOKENIZER_FILES, "config.json", "model.safetensors"}
    for name, text in TOKENIZER_FILES.items():
        assert (tmp_path / "out" / name).read_text() == text


def test_saving_over_the_source_keeps_its_tokenizer(make_folder):
    folder, _ = make_folder()
    before = read_folder(folder)
    save_decoder(load_decoder(folder, get_recipe("bf16")), folder, folder)
    same_bytes(read_folder(folder), before)
    assert (folder / "tokenizer.json").read_text() == TOKENIZER_FILES["tokenizer.json"]
    assert {path.name for path in folder.parent.iterdir()} == {folder.name}


def test_old_shards_do_not_outlive_a_new_save(make_folder, tmp_path):
    folder, _ = make_folder()
    decoder = load_decoder(folder, get_recipe("bf16"))
    save_decoder(decoder, tmp_path / "out", folder, max_shard_size="60KB")
    save_decoder(decoder, tmp_path / "out", folder)
    assert [file.name for file in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize("broken", ["second_shard", "config", "tokenizer", "rename"])
def test_an_interrupted_save_leaves_the_old_folder(make_folder, tmp_path, monkeypatch, broken):
    folder, _ = make_folder()
    decoder = load_decoder(folder, get_recipe("bf16"))
    save_decoder(decoder, tmp_path / "out", folder)
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with torch.no_grad():
        decoder.norm.weight.mul_(2.0)

    calls = []

    def fail(real, at):
        def wrapped(*args, **kwargs):
            calls.append(args)
            if len(calls) == at:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        if broken == "second_shard":
            patch.setattr(checkpoint, "save_file", fail(save_file, 2))
        elif broken == "config":
            config_class = type(decoder.hf_config)
            patch.setattr(config_class, "save_pretrained", fail(config_class.save_pretrained, 1))
        elif broken == "tokenizer":
            patch.setattr(checkpoint.shutil, "copy2", fail(shutil.copy2, 3))
        else:
            patch.setattr(checkpoint.Path, "rename", fail(checkpoint.Path.rename, 1))
        with pytest.raises(OSError, match="No space left"):
            save_decoder(decoder, tmp_path / "out", folder, max_shard_size="60KB")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before

    save_decoder(decoder, tmp_path / "out", folder)  # what the failure left does not get in the way
    gain = read_folder(tmp_path / "out")["model.norm.weight"]
    assert torch.equal(gain, decoder.norm.weight.data.bfloat16())
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_what_is_no_model_folder_is_not_replaced(make_folder, tmp_path):
    folder, _ = make_folder()
    decoder = load_decoder(folder, get_recipe("bf16"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    for name in ("home", "file"):
        with pytest.raises(ValueError, match=f"{name} exists and is not a model folder"):
            save_decoder(decoder, tmp_path / name, folder)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    save_decoder(decoder, tmp_path / "empty", folder)
    same_bytes(read_folder(tmp_path / "empty"), read_folder(folder))


# What is damaged.


def rewrite(folder, change):
    tensors = read_folder(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"1 tensors.*'model\.layers\.1\.mlp\.up_proj\.weight'"),
        (lambda t: t.pop("model.layers.0.self_attn.q_norm.weight"), r"'model\.layers\.0\.self_attn\.q_norm\.weight'"),
        (lambda t: t.pop("lm_head.weight"), r"1 tensors.*'lm_head\.weight'"),
        (lambda t: t.clear(), r"25 tensors.*'model\.embed_tokens\.weight'"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(200, 96)}),
            r"holds 'model\.layers\.2\.mlp\.up_proj\.weight', which a qwen3 decoder",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}),
            r"q_proj\.bias', which a qwen3",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.zeros(200, 96)}),
            r"down_proj\.weight is torch\.float32 \(200, 96\);.*\(96, 200\)",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.zeros(96, 96)}),
            r"embed_tokens\.weight is torch\.float32 \(96, 96\);.*\(97, 96\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(1)}),  # would broadcast
            r"model\.norm\.weight is torch\.float32 \(1,\);.*\(96,\)",
        ),
        (
            lambda t: t.update({k: v.to(E4M3) for k, v in t.items() if k.endswith("o_proj.weight")}),
            r"o_proj\.weight is torch\.float8_e4m3fn",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(96, dtype=torch.int32)}),
            r"model\.norm\.weight is torch\.int32",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(make_folder, change, message):
    folder, _ = make_folder()
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message) as caught:
        load_decoder(folder, get_recipe("block128"))
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_named(make_folder, kept):
    folder, _ = make_folder()
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read") as caught:
        load_decoder(folder, get_recipe("block128"))
    assert str(folder) in str(caught.value)


def test_a_missing_shard_is_named(make_folder, tmp_path):
    folder, _ = make_folder()
    save_decoder(load_decoder(folder, get_recipe("bf16")), tmp_path / "out", folder, max_shard_size="60KB")
    gone = sorted((tmp_path / "out").glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"{gone.name} cannot be read"):
        load_decoder(tmp_path / "out", get_recipe("bf16"))


def test_shards_without_an_index_are_all_read(make_folder, tmp_path):
    folder, model = make_folder()
    decoder = load_decoder(folder, get_recipe("bf16"))
    save_decoder(decoder, tmp_path / "out", folder, max_shard_size="60KB")
    (tmp_path / "out" / "model.safetensors.index.json").unlink()
    masters = masters_by_name(load_decoder(tmp_path / "out", get_recipe("bf16")))
    for name, tensor in model.named_parameters():
        assert torch.equal(masters[name], tensor.detach().float()), name


@pytest.mark.parametrize("text", ["", '{"weight_ma', "{}", '{"metadata": {}}'])
def test_a_damaged_index_is_named(make_folder, text):
    folder, _ = make_folder()
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is damaged"):
        load_decoder(folder, get_recipe("bf16"))


def test_a_folder_without_safetensors_is_named(make_folder):
    folder, _ = make_folder()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no \*\.safetensors file"):
        load_decoder(folder, get_recipe("bf16"))


def test_an_fp8_checkpoint_is_refused_by_its_config(make_folder):
    folder, _ = make_folder()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantization_config=.*weight_block_size"):
        load_decoder(folder, get_recipe("block128"))


def test_max_tokens_beyond_the_positions_is_refused(make_folder):
    folder, _ = make_folder()
    assert load_decoder(folder, get_recipe("bf16"), max_tokens=100).max_tokens == 100
    with pytest.raises(ValueError, match=r"up to 300 tokens.*256 positions"):
        load_decoder(folder, get_recipe("bf16"), max_tokens=300)


def test_weights_that_the_hub_does_not_give_are_named(make_folder, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder, _ = make_folder()
    decoder = load_decoder(folder, get_recipe("bf16"))
    with pytest.raises(ValueError, match=r"'octavo-tests/nowhere' could not be fetched"):
        save_decoder(decoder, tmp_path / "out", "octavo-tests/nowhere")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(checkpoint, "read_config", lambda path: (decoder.config, decoder.hf_config))
    with pytest.raises(ValueError, match=r"'octavo-tests/nowhere' could not be fetched"):
        load_decoder("octavo-tests/nowhere", get_recipe("bf16"))


def test_extra_tensors_that_transformers_ignores_are_ignored(make_folder):
    folder, model = make_folder(family="llama", tie_word_embeddings=True)
    rewrite(
        folder,
        lambda t: t.update(
            {
                "lm_head.weight": t["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16),
            }
        ),
    )
    decoder = load_decoder(folder, get_recipe("bf16"))
    assert torch.equal(decoder.embed_tokens.data, model.model.embed_tokens.weight.detach().float())
    assert decoder.lm_head is None


# Dither.


def fp8_ties(decoder: Decoder) -> tuple[int, int]:
    """(weights that sit exactly between two E4M3 codes of their block, weights)."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()  # 0 to 448, ascending
    middles = (codes[1:] + codes[:-1]) / 2
    num_ties = num_weights = 0
    for name, master in masters_by_name(decoder).items():
        if name.endswith("_proj.weight"):
            matrix = quantize_matrix(master, BLOCK_128X128)
            rows, columns = (torch.arange(size) // 128 for size in master.shape)
            scale = matrix.scale[rows[:, None], columns]
            num_ties += torch.isin((master / scale).abs(), middles).sum().item()
            num_weights += master.numel()
    return num_ties, num_weights


def test_dither_moves_masters_inside_their_bf16_interval(make_folder):
    folder, _ = make_folder(family="qwen2")
    plain = masters_by_name(load_decoder(folder, get_recipe("block128")))
    decoder = load_decoder(folder, get_recipe("block128"), dither_seed=7)
    dithered = masters_by_name(decoder)
    for name, master in dithered.items():
        same_bytes({name: master.bfloat16()}, {name: plain[name].bfloat16()})
        moved = (master != plain[name]).float().mean().item()
        if name.endswith("_proj.weight"):
            assert moved > 0.98, f"{name}: only {moved:.3f} of the masters moved"
            # Uniform over one BF16 spacing: standard deviation spacing / sqrt(12), and no drift.
            spacing = 2.0 ** (torch.floor(torch.log2(plain[name].abs())) - 7)
            offset = (master - plain[name]) / spacing
            assert abs(offset.std().item() - 12**-0.5) < 0.01
            assert abs(offset.mean().item()) < 0.01
            assert offset.abs().max() <= 0.5
        else:
            assert moved == 0.0, name
    # The bytes that run are those of the dithered masters.
    wanted = quantize_matrix(decoder.layers[1].o_proj.weight.data, BLOCK_128X128)
    assert torch.equal(decoder.layers[1].o_proj.weight_q.view(torch.uint8), wanted.q.view(torch.uint8))


def test_dither_follows_its_seed(make_folder):
    folder, _ = make_folder()
    first, again, other = (
        masters_by_name(load_decoder(folder, get_recipe("block128"), dither_seed=seed)) for seed in (7, 7, 8)
    )
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(first[name], again[name])
    assert (first[name] != other[name]).float().mean() > 0.95
    # Layers draw different numbers.
    a, b = (first[f"model.layers.{index}.mlp.down_proj.weight"] for index in (0, 1))
    fractions = [(x - x.bfloat16().float()) * 2.0 ** (7 - torch.floor(torch.log2(x.abs()))) for x in (a, b)]
    assert abs(torch.corrcoef(torch.stack([f.flatten() for f in fractions]))[0, 1].item()) < 0.03


def test_dither_takes_masters_off_the_fp8_ties(make_folder):
    folder, _ = make_folder(family="llama", hidden_size=256, intermediate_size=520)
    ties, total = fp8_ties(load_decoder(folder, get_recipe("block128")))
    dithered_ties, _ = fp8_ties(load_decoder(folder, get_recipe("block128"), dither_seed=0))
    print(f"on a tie: {ties} of {total} ({ties / total:.2%}), dithered {dithered_ties}")
    assert ties > 0.002 * total
    assert dithered_ties < 0.02 * ties


def test_dither_keeps_zeros_powers_of_two_and_extremes():
    decoder = tiny_decoder(tiny_config("llama"), get_recipe("block128"))
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-20, -(2.0**-120), 1e-40, 3.3895e38, -3.3895e38, 0.3])
    values = values.bfloat16().float()
    weight = decoder.layers[0].o_proj.weight.data
    weight.view(-1)[: len(values)] = values
    seen = []
    for seed in range(30):
        weight.view(-1)[: len(values)] = values
        dither_masters_(decoder, seed)
        now = weight.view(-1)[: len(values)].clone()
        same_bytes({"": now.bfloat16()}, {"": values.bfloat16()})
        seen.append(now)
    seen = torch.stack(seen)
    assert torch.isfinite(seen).all()
    assert (seen[:, :2] == 0.0).all(), "a zero is a pruned weight: it stays"
    # Below a power of two the spacing is half as wide: never further down than a quarter of the spacing above.
    assert seen[:, 2].min() >= 1.0 - 2.0**-9 and 1.0 < seen[:, 2].max() <= 1.0 + 2.0**-8
