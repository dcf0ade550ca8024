"""The rollout of a step: prompts, completions, rewards, advantages, and the mini-batches that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.rl.advantages import estimate_advantages
from octavo.rl.batch import MiniBatch, pack
from octavo.rl.dynamic_sampling import informative, num_to_draw, sampling_metrics
from octavo.rl.gae import GAEConfig
from octavo.rl.observatory import group_metrics
from octavo.rl.overlong import overlong_penalty
from octavo.rollout.engine import Completion
from octavo.rollout.sampler import NonFiniteLogits
from octavo.trainer.config import TrainConfig
from octavo.trainer.divergence import Diverged, StepRecord
from octavo.trainer.progress import Progress
from octavo.trainer.run import TRAINING, EncodedProblem, Run
from octavo.trainer.scoring import Scored, Scoring


@dataclass(frozen=True, eq=False, kw_only=True)
class Groups:
    """Prompts with their completions and rewards."""

    problems: list[EncodedProblem]
    """P."""
    completions: list[list[Completion]]
    """P x G."""
    scored: list[list[Scored]]
    """P x G, what was found of each."""
    rewards: Tensor
    """[P, G] fp32, before penalties."""

    def __add__(self, other: Groups) -> Groups:
        return Groups(
            problems=self.problems + other.problems,
            completions=self.completions + other.completions,
            scored=self.scored + other.scored,
            rewards=torch.cat([self.rewards, other.rewards]),
        )

    def at(self, places: list[int]) -> Groups:
        """Some of them."""
        return Groups(
            problems=[self.problems[place] for place in places],
            completions=[self.completions[place] for place in places],
            scored=[self.scored[place] for place in places],
            rewards=self.rewards[places],
        )


def collect(run: Run, progress: Progress, record: StepRecord) -> tuple[Groups, Groups, dict[str, float]]:
    """Sample and score the step's prompts, and under dynamic sampling more, until enough groups are informative.

    Args:
        run: what samples and scores.
        progress: says which prompts are next.
        record: of the step; is told the prompts.

    Returns:
        All groups drawn, those to train on, and metrics of the choice.

    Raises:
        ValueError: no group of any try is informative.
    """
    config, num_wanted = run.config, run.config.rollout.prompts_per_step
    dynamic = config.algorithm.dynamic_sampling
    drawn = draw(run, progress, record, num_wanted)
    if dynamic is None:
        return drawn, drawn, {}
    kept, num_tries = informative(shaped_rewards(config, drawn)), 1
    with record.clock.phase("refill"):
        while (num_kept := int(kept.sum())) < num_wanted and num_tries < dynamic.max_tries:
            drawn += draw(run, progress, record, num_to_draw(num_wanted, num_kept, len(kept)))
            kept, num_tries = informative(shaped_rewards(config, drawn)), num_tries + 1
    chosen = drawn.at(kept.nonzero().flatten().tolist()[:num_wanted])
    metrics = sampling_metrics(drawn.rewards, kept, len(chosen.problems), num_tries)
    if not chosen.problems:
        raise ValueError(
            f"step {record.step}: none of {len(kept)} groups in {num_tries} tries has two different rewards "
            f"({metrics['sampling/all_right_share']:.0%} are all right, {metrics['sampling/all_wrong_share']:.0%} all "
            f"wrong), so dynamic sampling leaves nothing to train on. Raise rollout.group_size or "
            f"algorithm.dynamic_sampling.max_tries, or take other problems"
        )
    return drawn, chosen, metrics


def draw(run: Run, progress: Progress, record: StepRecord, count: int) -> Groups:
    """Sample and score the next prompts after those that the step has drawn so far."""
    first = len(record.prompts)
    problems = run.problems(progress.next_prompt + first, count, progress.rollbacks)
    record.prompts += [encoded.problem.id for encoded in problems]
    scoring = Scoring(run, run.task, problems, run.config.rollout.group_size, run.config.reward)
    completions = sample(run, problems, run.seed(TRAINING, record.step, progress.rollbacks), first, scoring.add)
    with record.clock.phase("reward_wait"):
        scored = scoring.gather()
    return Groups(problems=problems, completions=completions, scored=scored, rewards=score(scored))


def sample(
    run: Run,
    problems: list[EncodedProblem],
    seed: int,
    first_index: int = 0,
    on_completion: Callable[[int, int, Completion], None] | None = None,
) -> list[list[Completion]]:
    """P groups of G completions with rollout_logprobs.

    Args:
        run, problems, seed: who samples, P prompts, and the random numbers.
        first_index: the first prompt's place in the step.
        on_completion: told of each as it finishes.
    """
    rollout = run.config.rollout
    with run.display.bar("rollout", len(problems) * rollout.group_size) as advance:
        try:
            return run.engine.generate(
                [problem.prompt for problem in problems],
                rollout.sampling,
                max_completion_tokens=rollout.max_completion_tokens,
                group_size=rollout.group_size,
                seed=seed,
                first_index=first_index,
                progress=run.on_step(advance),
                on_completion=on_completion,
            )
        except NonFiniteLogits as error:
            raise Diverged(f"rollout ({error})", dict(run.policy.named_parameters())) from error


def score(scored: list[list[Scored]]) -> Tensor:
    """Rewards [P, G] fp32."""
    return torch.tensor([[each.reward for each in group] for group in scored])


def penalties(config: TrainConfig, completions: list[list[Completion]]) -> Tensor:
    """Overlong penalty [P, G] fp32 of each completion, in reward units."""
    return overlong_penalty(_lengths(completions), config.rollout.max_completion_tokens, config.algorithm.overlong)


def shaped_rewards(config: TrainConfig, groups: Groups) -> Tensor:
    """Rewards [P, G] fp32 less the overlong penalty: what advantages come from."""
    return groups.rewards - penalties(config, groups.completions)


def judge(config: TrainConfig, groups: Groups) -> Tensor:
    """Advantages [P, G] fp32; under gae the rewards, of which a critic makes advantages of tokens."""
    rewards, advantage = shaped_rewards(config, groups), config.algorithm.advantage
    if isinstance(advantage, GAEConfig):
        return rewards
    return estimate_advantages(rewards, _lengths(groups.completions), advantage)


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


def rollout_metrics(config: TrainConfig, groups: Groups) -> dict[str, float]:
    """Rewards and completions of a rollout."""
    flat = [completion for group in groups.completions for completion in group]
    lengths, rewards = torch.tensor([float(len(completion.tokens)) for completion in flat]), groups.rewards
    metrics = {
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(correction=0).item(),
        "reward/informative_groups_share": informative(shaped_rewards(config, groups)).float().mean().item(),
        **group_metrics(rewards),
        "completion/length_mean": lengths.mean().item(),
        "completion/length_p90": lengths.quantile(0.9).item(),
        "completion/length_max": lengths.max().item(),
        "completion/truncated_share": sum(c.finish_reason == "length" for c in flat) / len(flat),
        "rollout/num_tokens": lengths.sum().item(),
    }
    if config.algorithm.overlong.buffer_tokens:
        metrics["reward/overlong_penalty_mean"] = penalties(config, groups.completions).mean().item()
    return metrics


def logged_samples(run: Run, groups: Groups, advantages: Tensor) -> list[dict[str, Any]]:
    """Rows of samples.jsonl: the first completion of each prompt, then the second, as many as the config wants."""
    problems, completions, scored = groups.problems, groups.completions, groups.scored
    by_critic = isinstance(run.config.algorithm.advantage, GAEConfig)  # which gives one to each token
    count = min(run.config.trainer.logged_samples, len(problems) * len(completions[0]))
    places = [(index % len(problems), index // len(problems)) for index in range(count)]
    return [
        {
            "id": problems[p].problem.id,
            "prompt": run.task.prompt_text(problems[p].problem),
            "completion": scored[p][g].text,
            "answer": problems[p].problem.answer,
            "outcome": scored[p][g].verdict.outcome,
            "reward": scored[p][g].reward,
            "advantage": None if by_critic else advantages[p, g].item(),
            "finish_reason": completions[p][g].finish_reason,
            "num_tokens": len(completions[p][g].tokens),
            "mean_logprob": sum(completions[p][g].rollout_logprobs) / len(completions[p][g].tokens),
        }
        for p, g in places
    ]


def _lengths(completions: list[list[Completion]]) -> Tensor:
    """[P, G] tokens of each."""
    return torch.tensor([[len(completion.tokens) for completion in group] for group in completions])
