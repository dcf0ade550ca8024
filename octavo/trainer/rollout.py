"""The rollout of a step: prompts, completions, rewards, advantages, and the mini-batches that they make."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.rl.advantages import estimate_advantages
from octavo.rl.batch import MiniBatch, pack
from octavo.rl.overlong import overlong_penalty
from octavo.rollout.engine import Completion
from octavo.rollout.sampler import NonFiniteLogits
from octavo.trainer.config import TrainConfig
from octavo.trainer.divergence import Diverged
from octavo.trainer.run import EncodedProblem, Run


def sample(run: Run, problems: list[EncodedProblem], seed: int) -> list[list[Completion]]:
    """P groups of G completions with rollout_logprobs."""
    rollout = run.config.rollout
    with run.display.bar("rollout", len(problems) * rollout.group_size) as advance:
        try:
            return run.engine.generate(
                [problem.prompt for problem in problems],
                rollout.sampling,
                max_completion_tokens=rollout.max_completion_tokens,
                group_size=rollout.group_size,
                seed=seed,
                progress=run.on_step(advance),
            )
        except NonFiniteLogits as error:
            raise Diverged(f"rollout ({error})", dict(run.policy.named_parameters())) from error


def score(run: Run, problems: list[EncodedProblem], completions: list[list[Completion]]) -> Tensor:
    """Rewards [P, G] fp32."""
    return torch.tensor(
        [
            [run.task.score(encoded.problem, run.decode(completion.tokens)) for completion in group]
            for encoded, group in zip(problems, completions, strict=True)
        ]
    )


def judge(config: TrainConfig, completions: list[list[Completion]], rewards: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Advantages [P, G] fp32 of rewards less the overlong penalty, and what that penalty was."""
    num_tokens = torch.tensor([[len(completion.tokens) for completion in group] for group in completions])
    penalty = overlong_penalty(num_tokens, config.rollout.max_completion_tokens, config.algorithm.overlong)
    shaped = rewards - penalty
    metrics = {"reward/informative_groups_share": (shaped != shaped[:, :1]).any(dim=1).float().mean().item()}
    if config.algorithm.overlong.buffer_tokens:
        metrics["reward/overlong_penalty_mean"] = penalty.mean().item()
    return estimate_advantages(shaped, num_tokens, config.algorithm.advantage), metrics


def batches(config: TrainConfig, completions: list[list[Completion]], advantages: Tensor) -> list[MiniBatch]:
    """Mini-batches of what enters the loss.

    Raises:
        ValueError: every completion was cut off, and those are left out.
    """
    mini_batches = pack(
        completions,
        advantages,
        num_mini_batches=config.trainer.num_mini_batches,
        microbatch_tokens=config.trainer.microbatch_tokens,
        device=config.device,
        leave_out_truncated=config.algorithm.overlong.filter_truncated,
    )
    if not mini_batches:
        raise ValueError(
            f"every completion of a step was cut off at rollout.max_completion_tokens="
            f"{config.rollout.max_completion_tokens}, and algorithm.overlong.filter_truncated=true leaves none in the "
            f"loss. Raise the limit, or use filter_truncated: false"
        )
    return mini_batches


def rollout_metrics(completions: list[list[Completion]], rewards: Tensor) -> dict[str, Any]:
    """Rewards and completions of a rollout."""
    flat = [completion for group in completions for completion in group]
    lengths = torch.tensor([float(len(completion.tokens)) for completion in flat])
    return {
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(correction=0).item(),
        "completion/length_mean": lengths.mean().item(),
        "completion/length_p90": lengths.quantile(0.9).item(),
        "completion/length_max": lengths.max().item(),
        "completion/truncated_share": sum(c.finish_reason == "length" for c in flat) / len(flat),
        "rollout/num_tokens": lengths.sum().item(),
    }


def logged_samples(
    run: Run,
    problems: list[EncodedProblem],
    completions: list[list[Completion]],
    rewards: Tensor,
    advantages: Tensor,
) -> list[dict[str, Any]]:
    """Rows of samples.jsonl: the first completion of each prompt, then the second, as many as the config wants."""
    count = min(run.config.trainer.logged_samples, len(problems) * len(completions[0]))
    places = [(index % len(problems), index // len(problems)) for index in range(count)]
    return [
        {
            "id": problems[p].problem.id,
            "prompt": run.task.prompt_text(problems[p].problem),
            "completion": run.decode(completions[p][g].tokens),
            "answer": problems[p].problem.answer,
            "reward": rewards[p, g].item(),
            "advantage": advantages[p, g].item(),
            "finish_reason": completions[p][g].finish_reason,
            "num_tokens": len(completions[p][g].tokens),
            "mean_logprob": sum(completions[p][g].rollout_logprobs) / len(completions[p][g].tokens),
        }
        for p, g in places
    ]
