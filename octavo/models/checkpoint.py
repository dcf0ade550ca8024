"""Hugging Face folders in and out: sharded safetensors, fused projections split and joined by name.

Names on disk are transformers' (`model.layers.0.self_attn.q_proj.weight`); in memory q, k, v and gate, up are fused.
Weights are BF16 (FP16, FP32), or FP8 by blocks (`models.fp8_folder`).
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from octavo.kernels.device import require_kernels
from octavo.models import fp8_folder
from octavo.models.config import read_config
from octavo.models.decoder import Decoder
from octavo.numerics.fp8 import E4M3
from octavo.numerics.recipe import Recipe

WeightFormat = Literal["bf16", "fp8"]
"""Of the linear layers in a folder."""
KEPT_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "generation_config.json",
    "vocab*",
    "merges.txt",
)


def load_decoder(
    path: str | Path,
    recipe: Recipe,
    *,
    max_tokens: int | None = None,
    dither_seed: int | None = None,
    device: str | torch.device = "cpu",
    masters: bool = True,
) -> Decoder:
    """Read a model, fill the masters in FP32 and quantise them.

    Args:
        path: Hugging Face folder or hub id.
        recipe: the precision flow.
        max_tokens: longest sequence that will be run; default the model's own limit.
        dither_seed: if given, move each master at random inside the interval that rounds to its BF16 value, so that
            weights do not sit on FP8 rounding ties together (`dither_masters`).
        device: where the decoder lives.
        masters: False keeps none of the matrices' and brings those of one layer at a time to the device: the decoder
            can sample, and no more.

    Raises:
        ValueError: the folder is missing, incomplete, damaged, or not a supported model; the recipe's kernels do not
            run on the device.
    """
    require_kernels(device, recipe.high_precision)
    config, hf_config = read_config(path)
    decoder = Decoder(config, hf_config, recipe, max_tokens=max_tokens)
    folder = _folder(path)
    in_fp8 = getattr(hf_config, "quantization_config", None) is not None
    if in_fp8 and dither_seed is not None:
        raise ValueError(f"model.dither_masters moves BF16 weights, and {path} holds FP8 ones. Set it to false")
    missing = dict(_tensors(decoder))
    fp8_parts: dict[str, Tensor] = {}
    for name, tensor in _read_tensors(folder):
        if in_fp8 and (tensor.dtype == E4M3 or name.endswith(fp8_folder.SCALE)):
            fp8_parts[name] = tensor
            continue
        target = missing.pop(name, None)
        if target is None:
            if name == "lm_head.weight" and config.tied_embeddings or name.endswith("rotary_emb.inv_freq"):
                continue
            raise ValueError(f"{folder} holds {name!r}, which a {config.family} decoder of this config does not have")
        if tensor.shape != target.shape or not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ValueError(
                f"{folder}: {name} is {tensor.dtype} {tuple(tensor.shape)}; the config wants a BF16, FP16 or FP32 "
                f"tensor {tuple(target.shape)}"
            )
        if not torch.isfinite(tensor).all():
            raise ValueError(
                f"{folder}: {name} has values that are not finite; the file is damaged or training diverged"
            )
        with torch.no_grad():
            target.copy_(tensor)
    weights = _fp8_weights(folder, fp8_parts, missing)
    if missing:
        raise ValueError(
            f"{folder} is incomplete: {len(missing)} tensors are missing, the first is {next(iter(missing))!r}"
        )
    if dither_seed is not None:
        dither_masters_(decoder, dither_seed)
    if masters:
        decoder.to(device)
        decoder.requantize_(policy_version=0)
    else:
        decoder.quantize_onto_(device)
    fp8_folder.put_bytes_(decoder, weights)
    return decoder


def save_decoder(
    decoder: Decoder, path: str | Path, source: str | Path, max_shard_size: str = "5GB", weights: WeightFormat = "bf16"
) -> None:
    """Write a Hugging Face folder, whole or not at all, with the tokenizer files of `source`.

    Args:
        decoder: its masters are rounded to BF16 (kept in FP32 under the fp32 recipe).
        path: folder to make; a model folder that is there already is replaced once the new one is complete.
        source: folder or hub id that the model came from.
        max_shard_size: of one safetensors file, "5GB".
        weights: "fp8" writes the bytes and scales of quantised projections as the decoder has them.

    Raises:
        ValueError: the recipe's weights have no FP8 folder, path holds something that is not a model, or the files of
            `source` are gone.
        OSError: the disk is full or broken; a model that was there is as it was.
    """
    path = Path(path)
    if path.exists() and not (path / "config.json").is_file() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} exists and is not a model folder, so it is not replaced; give another")
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write_folder(decoder, partial, source, max_shard_size, weights)
    except (OSError, ValueError):
        shutil.rmtree(partial, ignore_errors=True)
        raise
    replaced = path.with_name(path.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


@torch.no_grad()
def dither_masters_(decoder: Decoder, seed: int) -> None:
    """Move each linear's master at random inside the interval of FP32 values that round to the same BF16 value."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in _tensors(decoder):
        if not name.endswith("_proj.weight"):
            continue
        bf16 = tensor.bfloat16()
        step = torch.exp2(torch.floor(torch.log2(bf16.float().abs().clamp(min=2.0**-126))) - 7)  # BF16 spacing
        noise = torch.rand(tensor.shape, generator=generator) - 0.5
        moved = bf16.float() + noise * step
        stays = (bf16 == 0.0) | (moved.bfloat16() != bf16)  # zeros keep their sign
        tensor.copy_(torch.where(stays, bf16.float(), moved))


def _fp8_weights(
    folder: Path, parts: dict[str, Tensor], missing: dict[str, Tensor]
) -> dict[str, fp8_folder.StoredWeight]:
    """FP8 weights of a folder from their tensors. Fills their masters, which are then no longer `missing`."""
    weights = {}
    for name in dict.fromkeys(part.rpartition(".")[0] for part in parts):
        q, scale, target = parts.get(f"{name}.weight"), parts.get(f"{name}.{fp8_folder.SCALE}"), f"{name}.weight"
        if target not in missing:
            raise ValueError(f"{folder} holds {name!r} in FP8, which this decoder does not have, or in BF16, too")
        master = missing.pop(target)
        weights[name] = fp8_folder.checked(str(folder), name, q, scale, master.shape)
        master.copy_(weights[name].values())
    return weights


def _write_folder(
    decoder: Decoder, folder: Path, source: str | Path, max_shard_size: str, weights: WeightFormat
) -> None:
    hf_config = copy.deepcopy(decoder.hf_config)
    hf_config.dtype = decoder.dtype
    if hasattr(hf_config, "quantization_config"):
        del hf_config.quantization_config
    quantized = fp8_folder.stored_weights(decoder) if weights == "fp8" else {}
    state = {
        name: tensor.detach().to("cpu", decoder.dtype).contiguous()
        for name, tensor in _tensors(decoder)
        if name.removesuffix(".weight") not in quantized
    }
    for name, stored in quantized.items():
        state[f"{name}.weight"] = stored.q.cpu().contiguous()
        state[f"{name}.{fp8_folder.SCALE}"] = stored.scale.cpu().contiguous()
    if weights == "fp8":
        hf_config.quantization_config = fp8_folder.quantization_config(decoder)
    split = split_torch_state_dict_into_shards(state, max_shard_size=max_shard_size)
    for filename, names in split.filename_to_tensors.items():
        try:
            save_file({name: state[name] for name in names}, folder / filename, metadata={"format": "pt"})
        except SafetensorError as error:  # its own class for a full disk
            raise OSError(None, str(error), str(folder / filename)) from error
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    hf_config.save_pretrained(folder)
    for pattern in KEPT_FILES:
        for file in filter(Path.is_file, _folder(source).glob(pattern)):
            shutil.copy2(file, folder / file.name)


def _tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(name on disk, master or the view of it) of every parameter."""
    yield "model.embed_tokens.weight", decoder.embed_tokens.data
    for index, block in enumerate(decoder.blocks()):
        prefix = f"model.layers.{index}"
        fused = {
            "self_attn": [block.qkv_proj, block.o_proj],
            "mlp": [block.gate_up_proj, block.down_proj],
        }
        for parent, linears in fused.items():
            for linear in linears:
                for kind, parameter in (("weight", linear.weight), ("bias", linear.bias)):
                    if parameter is not None:
                        for name, part in zip(linear.projections, parameter.data.split(linear.splits), strict=True):
                            yield f"{prefix}.{parent}.{name}.{kind}", part
        yield f"{prefix}.input_layernorm.weight", block.input_norm.weight.data
        yield f"{prefix}.post_attention_layernorm.weight", block.post_norm.weight.data
        if block.q_norm is not None and block.k_norm is not None:
            yield f"{prefix}.self_attn.q_norm.weight", block.q_norm.weight.data
            yield f"{prefix}.self_attn.k_norm.weight", block.k_norm.weight.data
    yield "model.norm.weight", decoder.norm.weight.data
    if decoder.lm_head is not None:
        yield "lm_head.weight", decoder.lm_head.data


def _folder(path: str | Path) -> Path:
    """A local folder as it is, a hub id downloaded."""
    if Path(path).is_dir():
        return Path(path)
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(str(path), allow_patterns=patterns, ignore_patterns=["consolidated*"]))
    except (OSError, ValueError) as error:
        raise ValueError(f"the files of model {str(path)!r} could not be fetched from the hub: {error}") from error


def weight_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The safetensors files of a model, and those beside them that are left aside.

    The model is what the index names, else model.safetensors, else every file but `consolidated*`, a copy under other
    names that Llama and Mistral folders hold, and hidden ones.

    Raises:
        ValueError: there is none, or the index is damaged.
    """
    index, present = folder / "model.safetensors.index.json", sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            files = sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is damaged: it is no JSON object with a weight_map") from error
    elif (folder / "model.safetensors") in present:
        files = [folder / "model.safetensors"]
    else:
        files = [file for file in present if not file.name.startswith((".", "consolidated"))]
    if not files:
        raise ValueError(f"{folder} has no *.safetensors file; convert the weights to safetensors first")
    return files, [file for file in present if file not in files]


def _read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in weight_files(folder)[0]:
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():
                    yield name, reader.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
