"""The precision flow of a run: declared by its configuration, held to the live policy and engine before step 0."""

from __future__ import annotations

import torch

from octavo.kernels.attention import StoredKV
from octavo.kernels.heads import no_transform
from octavo.models.config import read_config
from octavo.models.decoder import Decoder
from octavo.models.modules import decoder_modules
from octavo.models.observed import LiveCache, check_observed, kv_probe, packed_cache
from octavo.numerics.flow_edges import declare_flow
from octavo.numerics.flow_vllm import vllm_graph
from octavo.numerics.precision_flow import PrecisionFlow, lines
from octavo.numerics.recipe import Recipe
from octavo.rollout.engine import Engine, RolloutEngine
from octavo.rollout.vllm_config import VLLMConfig
from octavo.trainer.config import TrainConfig


def declared_flow(config: TrainConfig) -> PrecisionFlow:
    """The flow that a configuration declares, from it and the model's config.json alone.

    Raises:
        ValueError: the model's config is missing or not supported, or `keep_bf16` does not fit it.
    """
    shape, _ = read_config(config.model.path)
    flow = declare_flow(
        decoder_modules(shape),
        rollout=config.precision.rollout_recipe(),
        train=config.precision.train_recipe(),
        reference=config.algorithm.kl.coefficient != 0.0,
    )
    if not isinstance(config.rollout.engine, VLLMConfig):
        return flow
    return PrecisionFlow(graphs=tuple(vllm_graph(graph) if graph.role == "rollout" else graph for graph in flow.graphs))


def rollout_shares_bytes(config: TrainConfig, flow: PrecisionFlow) -> bool:
    """Whether the rollout reads the policy's bytes, or needs a decoder of its own over the same masters.

    vLLM reads weights alone, so those of w8a16 are a block128 rollout's too.
    """
    if not isinstance(config.rollout.engine, VLLMConfig):
        return not flow.differences()
    return _weight_format(config.precision.rollout_recipe()) == _weight_format(config.precision.train_recipe())


def check_live(flow: PrecisionFlow, policy: Decoder, engine: RolloutEngine) -> None:
    """Hold what will run to the declared flow; another engine than octavo's own holds itself to it.

    Raises:
        ValueError: an edge is not as declared, or the engine reads other masters than the policy.
    """
    check_observed(flow.graph("train"), policy, packed_cache(policy))
    if isinstance(engine, Engine):
        check_observed(flow.graph("rollout"), engine.decoder, engine_cache(engine))
    masters = dict(engine.decoder.named_parameters())
    for name, parameter in policy.named_parameters():
        if masters[name] is not parameter:
            raise ValueError(
                f"the engine reads other masters than the policy trains, the first is {name}. Build it on the policy "
                f"or on policy.with_recipe(...)"
            )


def _weight_format(recipe: Recipe) -> tuple[object, ...]:
    """What the bytes of a decoder's weights depend on."""
    return recipe.fprop.right, recipe.keep_bf16, recipe.scale_rounding, recipe.high_precision


def engine_cache(engine: Engine) -> LiveCache:
    """What the engine's cache makes of keys and values, written to its first slots, which nobody holds yet."""
    cache, probe = engine.cache, kv_probe(engine.decoder)
    slots = torch.arange(len(probe), device=engine.device)
    cache.write(0, slots, probe, probe, probe, no_transform(len(probe), probe.shape[2], engine.device))
    k, v = (
        StoredKV(values[0, : len(probe)], None if scale is None else scale[0, : len(probe)])
        for values, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    )
    return LiveCache(cache.kv_format, k, v)


def flow_lines(flow: PrecisionFlow) -> list[str]:
    """What a run says of its flow before step 0: one line, and one per group of modules that differ."""
    projections = [node for node in flow.graph("train").nodes if node.kind == "projection"]
    num_fp8 = sum(not node.kept for node in projections)
    found = lines(flow.differences())
    forward = "rollout / training are two forwards:" if found else "rollout and training are one forward"
    return [
        f"precision flow (declared = found): {num_fp8} of {len(projections)} projections train in FP8; {forward}",
        *(f"  {line}" for line in found),
    ]
