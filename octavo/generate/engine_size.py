"""How large an engine is made: on a GPU whatever fits beside the weights, and no more than the completions can use."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.models.config import DecoderConfig
from octavo.numerics.recipe import Recipe
from octavo.rollout.cuda_graph import padded_size
from octavo.rollout.engine import EngineConfig
from octavo.trainer.memory import FRAGMENTATION, LIBRARY_BYTES, binary_size, rollout_bytes, workspace_bytes
from octavo.trainer.memory_held import forward_bytes, kv_token_bytes

REFERENCE_SEQUENCES = 64
"""At once, where no kernels run: there a step's time grows with every one of them."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What an engine is for."""

    num_completions: int
    longest: int
    """Tokens of the longest prompt, and of a completion as long as may be."""
    truncates: bool
    """Sampling by top_p, top_k or min_p."""
    kv_cache_tokens: int | None = None
    """As the user wants it; None for what fits."""
    max_sequences: int | None = None
    """As the user wants it; None for what is usual."""


def engine_config(demand: Demand, shape: DecoderConfig, recipe: Recipe, free: int | None) -> EngineConfig:
    """The engine for a demand.

    Args:
        demand: what is to be sampled, and what the user chose.
        shape, recipe: of the decoder.
        free: bytes of a GPU beside the weights; None where no kernels run.

    Raises:
        ValueError: it does not fit, with the bytes.
    """
    usual = EngineConfig()
    most = demand.max_sequences or (REFERENCE_SEQUENCES if free is None else usual.max_sequences)
    sequences = min(most, demand.num_completions)
    longest = -(-demand.longest // usual.page_size) * usual.page_size
    tokens = demand.kv_cache_tokens or sequences * longest
    if tokens < longest:
        raise ValueError(
            f"--kv-cache-tokens {tokens} is less than the {longest} that the longest prompt and a completion may need. "
            f"Raise it, or lower --max-tokens"
        )
    if free is not None:
        room = _room(demand, shape, recipe, sequences, free)
        wanted = demand.kv_cache_tokens or longest
        if wanted > room:
            size = binary_size(wanted * kv_token_bytes(shape, recipe))
            raise ValueError(
                f"a KV cache of {wanted} tokens takes {size}, and there is room for {max(room, 0)} tokens beside the "
                f"weights, in {binary_size(free)} of which steps of up to {sequences} sequences take a part. Lower "
                f"--kv-cache-tokens, --max-tokens or --max-sequences, or use --kv-cache fp8"
            )
        tokens = min(tokens, room)
    return EngineConfig(kv_cache_tokens=tokens, max_sequences=sequences)


def _room(demand: Demand, shape: DecoderConfig, recipe: Recipe, sequences: int, free: int) -> int:
    """Tokens that the KV cache can have, in whole pages, the scratch page left out."""
    usual, rows = EngineConfig(), padded_size(sequences)
    prefill_tokens = max(usual.max_prefill_tokens, demand.longest)
    prefill, decode = rollout_bytes(shape, recipe, rows, prefill_tokens, demand.longest, demand.truncates)
    page_table = 4 * rows * -(-demand.longest // usual.page_size)
    copies = forward_bytes(shape, recipe, on_gpu=True).operands  # made by the first products
    held = page_table + copies + workspace_bytes(rows, usual.cuda_graphs)
    room = math.floor((free - LIBRARY_BYTES - decode) / (1 + FRAGMENTATION)) - held - max(prefill, decode)
    return (room // (usual.page_size * kv_token_bytes(shape, recipe)) - 1) * usual.page_size
