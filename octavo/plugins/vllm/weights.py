"""Weights for a vLLM that is running: a folder that is published whole, checked on arrival, and reloaded in place.

    publish(decoder, "/dev/shm/policy", policy_version=3, source="Qwen/Qwen3-8B")      where octavo trains
    Receiver(llm).load("/dev/shm/policy")                                              where vLLM serves; 3

The folder is an FP8 folder of `models.fp8_folder`, in shards, with a manifest of their SHA-256. What cannot be checked
is not loaded, so the version that is being served stays. Neither side holds more than a shard beside its weights.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open

from octavo.models.checkpoint import save_decoder
from octavo.models.decoder import Decoder
from octavo.models.fp8_folder import SCALE, obstacles
from octavo.plugins.vllm.scales import check_kept
from octavo.rollout.vllm_config import supported_release
from octavo.trainer.errors import reason
from octavo.trainer.files import write_whole

MANIFEST = "octavo_transfer.json"
WORKER_EXTENSION = "octavo.plugins.vllm.worker.WorkerExtension"
"""vLLM's `worker_extension_cls`."""


def publish(
    decoder: Decoder, folder: str | Path, *, policy_version: int, source: str | Path, max_shard_size: str = "1GB"
) -> None:
    """Write the bytes and scales that the decoder multiplies, for `Receiver.load`.

    Args:
        decoder: with 128x128 blocks of weights, or with none, whose weights are then BF16.
        folder: to make or replace, on a disk or memory that vLLM's workers read.
        policy_version: optimiser steps in the weights.
        source: folder or hub id that the model came from, for its tokenizer files.
        max_shard_size: of one file.

    Raises:
        ValueError: vLLM's block FP8 refuses the model's shapes, or the recipe's weights have other blocks.
    """
    if refused := obstacles(decoder)["vLLM"]:
        raise ValueError(
            f"vLLM runs q, k, v and gate, up as one FP8 weight and refuses parts that are no multiple of 128 rows: "
            f"{', '.join(refused[:3])}{f' and {len(refused) - 3} more' if len(refused) > 3 else ''}. Serve BF16, or "
            f"keep these projections in precision.keep_bf16"
        )
    folder = Path(folder)
    weights: Literal["fp8", "bf16"] = "fp8" if decoder.recipe.quantizes else "bf16"
    save_decoder(decoder, folder, source, max_shard_size, weights)
    files = {path.name: _digest(path) for path in sorted(folder.glob("*.safetensors"))}
    write_whole(folder / MANIFEST, json.dumps({"policy_version": policy_version, "sha256": files}))


class Receiver:
    """The weights of a vLLM engine.

    Args:
        llm: vllm.LLM, started with WORKER_EXTENSION on a folder of the same model in the same format.
        served: that folder, if `publish` wrote it.

    Raises:
        ValueError: this release of vLLM is not supported; its workers have no extension; `served` is damaged.
    """

    def __init__(self, llm: Any, served: str | Path | None = None) -> None:
        supported_release()
        self.llm = llm
        try:
            self.layers: list[dict[str, tuple[bool, str]]] = llm.collective_rpc("octavo_layers")
            """`WorkerExtension.octavo_layers` of each worker."""
        except Exception as error:  # of another kind in every release
            raise ValueError(
                f"vLLM's workers lack octavo's extension. Start it with worker_extension_cls={WORKER_EXTENSION!r}"
            ) from error
        self.served = None if served is None else Path(served)
        """Folder that was loaded last, or that vLLM was started on."""
        self.policy_version = None if self.served is None else _checked(self.served)
        """Of the weights in it; None before the first."""

    def load(self, folder: str | Path) -> int:
        """Reload the engine's weights in place and forget what it had computed from the old ones; their policy_version.

        Raises:
            ValueError: the folder is incomplete or damaged, or vLLM fails on it or would quantise it again; the message
                says which version is being served, that before if there is one.
        """
        folder = Path(folder)
        policy_version = _checked(folder)
        try:
            self._reload(folder)
        except Exception as error:  # of vLLM, torch, safetensors
            failure = f"vLLM fails on the weights of {folder}: {_line(error)}"
            self._go_back(folder, failure)
            raise ValueError(f"{failure}. It serves policy_version {self.policy_version} again") from error
        self.policy_version, self.served = policy_version, folder
        return policy_version

    def _go_back(self, failed: Path, failure: str) -> None:
        """Load the version before again, of which a failed load may have overwritten a part.

        Raises:
            ValueError: there is none, or vLLM fails on it too.
        """
        before, version = self.served, self.policy_version
        self.served = self.policy_version = None
        if before is None or before == failed:
            raise ValueError(f"{failure}. Start it again")
        try:
            self._reload(before)
        except Exception as error:
            raise ValueError(f"{failure}; and on policy_version {version}: {_line(error)}. Start it again") from error
        self.served, self.policy_version = before, version

    def _reload(self, folder: Path) -> None:
        self.llm.collective_rpc("octavo_reload", args=(str(folder),))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("its prefix cache could not be emptied, as requests are running: update between batches")


def check(folder: Path) -> int:
    """The policy_version of a published folder, every file of which is as it was written.

    Raises:
        ValueError: it is not.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        policy_version, wanted = int(manifest["policy_version"]), dict(manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error!r}): the weights are not complete. Wait for `publish` to return, or "
            f"call it again"
        ) from error
    found = {file.name: _digest(file) for file in sorted(folder.glob("*.safetensors"))}
    if damaged := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        raise ValueError(
            f"{folder}: {', '.join(damaged[:3])} changed or vanished since policy_version {policy_version} was "
            f"published. Nothing was loaded; publish it again"
        )
    return policy_version


def _checked(folder: Path) -> int:
    """As `check`, of scales that vLLM leaves as they are."""
    policy_version = check(folder)
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            for name in file.keys():
                if name.endswith(SCALE):
                    check_kept(name, file.get_tensor(name))
    return policy_version


def _line(error: Exception) -> str:
    return reason(error).rstrip(".")[:300]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
