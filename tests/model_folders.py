"""Model folders as transformers writes them, and how to compare them."""

import torch
from safetensors.torch import load_file
from tiny_models import (
    lay_end_to_end,
    tiny_config,
    tiny_transformers,
)

from octavo.layers.attention import PackedAttention

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


def folder_maker(tmp_path):
    """A function that writes a tiny model as transformers does and returns its folder and the model."""

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
