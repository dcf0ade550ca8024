"""verl in one process on a CPU, on the tiny model of examples/: engines, and mini-batches as its trainer makes them."""

import os
from functools import partial

import torch
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss
from verl_runs import MODEL

from octavo.plugins.verl import EngineConfig, PolicyLossConfig

BATCH, PROMPT, ANSWER = 4, 5, 11
CALIBRATION = {
    "type": "exact",
    "interval": 2,
    "pooled_steps": 2,
    "min_tokens": 1,
    "min_clipped": 0,
    "max_shadow_clipped": 1.0,
}


def start_process_group(rank=0, world_size=1, store=None):
    if not torch.distributed.is_initialized():
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0")
        store = store or torch.distributed.HashStore()
        torch.distributed.init_process_group(backend="gloo", store=store, rank=rank, world_size=world_size)


def actor_config(strategy, octavo=None, loss_mode="vanilla", loss_options=None):
    """verl's section on the actor, two sequences a microbatch."""
    engine = EngineConfig(
        use_torch_compile=False, fsdp_size=-1, use_dynamic_bsz=False, strategy="fsdp2", octavo=octavo or {}
    )
    return FSDPActorConfig(
        strategy=strategy,
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=2,
        fsdp_config=engine,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode, octavo=loss_options or {}),
        optim=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
    )


def make_engine(actor, model=MODEL, **changes):
    start_process_group()
    model_config = HFModelConfig(
        path=str(model),
        override_config={"attn_implementation": "sdpa"},
        use_remove_padding=False,
        **{"enable_gradient_checkpointing": False, **changes},
    )
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=actor.engine.strategy,
        model_config=model_config,
        engine_config=actor.engine,
        optimizer_config=actor.optim,
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def mini_batch(seed, last=False):
    """Random sequences with advantages of both signs; their old log-probabilities are to come."""
    generator = torch.Generator().manual_seed(seed)

    def nested(rows):
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    lengths = [ANSWER - row for row in range(BATCH)]
    prompts = [torch.randint(1, 100, (PROMPT,), generator=generator) for _ in lengths]
    answers = [torch.randint(1, 100, (length,), generator=generator) for length in lengths]
    tokens = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
    advantages = [torch.full((length,), 1.0 if row % 2 else -1.0) for row, length in enumerate(lengths)]
    masks = [torch.cat([torch.zeros(PROMPT), torch.ones(length)]) for length in lengths]
    data = TensorDict(
        {
            "input_ids": nested(tokens),
            "position_ids": nested(torch.arange(len(each)) for each in tokens),
            "prompts": nested(prompts),
            "responses": nested(answers),
            "loss_mask": nested(masks),
            "response_mask": nested(torch.ones(length, dtype=torch.int64) for length in lengths),
            "advantages": nested(advantages),
        },
        batch_size=BATCH,
    )
    tu.assign_non_tensor(
        data,
        use_remove_padding=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        max_token_len_per_gpu=512,
        use_fused_kernels=False,
        temperature=1.0,
        calculate_entropy=False,
        pad_mode=DatasetPadMode.NO_PADDING,
        global_batch_size=BATCH,
        update_lr_scheduler=last,
    )
    return data


def logprobs_of(engine, data):
    """verl's log-probabilities of every token, nested."""
    with engine.eval_mode():
        return engine.infer_batch(data)["model_output"]["log_probs"]


def with_old_logprobs(engine, data):
    """The mini-batch with log-probabilities of its answers before a step."""
    values, responses = logprobs_of(engine, data), data["responses"].offsets().diff().tolist()
    rows = [row[-length - 1 : -1] for row, length in zip(values.unbind(), responses, strict=True)]
    data["old_log_probs"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return data


def train(engine, actor, data):
    with engine.train_mode():
        return engine.train_batch(data, partial(ppo_loss, config=actor))


def two_updates(engine, actor, seed):
    """One step of verl's, of two mini-batches; what the last one returned."""
    batches = [mini_batch(seed), mini_batch(seed + 1, last=True)]
    for batch in batches:
        with_old_logprobs(engine, batch)
    return [train(engine, actor, batch) for batch in batches][-1]
