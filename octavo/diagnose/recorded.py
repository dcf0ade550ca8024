"""Diagnosis of log-probabilities that another framework dumped: what is there is judged, what is not is said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from octavo.diagnose.diagnosis import Diagnosis, Metrics, findings_of
from octavo.diagnose.dumps import Dump, read_dump
from octavo.rl.entropy import entropy_metrics
from octavo.rl.loss_clipped import beyond
from octavo.rl.losses import ClipConfig, clip_metrics
from octavo.rl.mismatch import mismatch_by_position, mismatch_metrics
from octavo.rl.observatory import (
    NULL,
    STEP,
    LogprobPair,
    ObservedTokens,
    answer_metrics,
    group_metrics,
    log_ratio_std,
    ratio_metrics,
)

ALL = "all rows"
"""Name of the column over every step."""
NEEDS = {
    "the mismatch of rollout and training": ("rollout_logprobs", "old_logprobs"),
    "the spread of the ratio": ("old_logprobs", "logprobs"),
    "clipping": ("old_logprobs", "logprobs", "advantages"),
    "over-clipping, agreement, amplification": (
        "old_logprobs",
        "logprobs",
        "shadow_old_logprobs",
        "shadow_logprobs",
        "advantages",
    ),
    "the null line": ("logprobs", "null_logprobs", "shadow_logprobs", "shadow_null_logprobs", "advantages"),
    "entropy": ("entropy",),
    "the clip matrix and high-entropy answers": ("entropy", "advantages"),
}
"""What can be diagnosed, and the columns that it takes."""


def diagnose_dump(paths: Sequence[Path], clip: ClipConfig) -> Diagnosis:
    """Read dumps and judge them, each step and all together.

    Raises:
        ValueError: of `read_dump`; or no completion has a loss token.
    """
    dump = read_dump(paths)
    if not len(dump.step):
        why = "no row has a token in the loss: its lists are empty, or its response_mask is 0"
        raise ValueError(f"{', '.join(map(str, paths))}: {why}. Correct them")
    steps = sorted({answer["step"] for answer in dump.answers})
    columns = {ALL: dump_metrics(dump, clip)}
    if len(steps) > 1:
        columns |= {f"step {step}": dump_metrics(dump.of_step(step), clip) for step in steps}
    names = [name for name in dump.columns if name != "response_mask"]
    facts = {
        "source": ", ".join(map(str, paths)),
        "completions": f"{len(dump.answers):,} in {len(steps)} steps",
        "loss tokens": f"{len(dump.step):,}",
        "columns": ", ".join(names),
        "bounds": f"[{clip.bounds().low:g}, {clip.bounds().high:g}]",
    }
    if dump.ignored:
        facts["not read"] = ", ".join(dump.ignored)
    return Diagnosis(
        title="recorded log-probabilities",
        facts=facts,
        columns=columns,
        findings=findings_of({ALL: columns[ALL]}, "rollout and training"),
        missing=missing_of(dump),
    )


def missing_of(dump: Dump) -> list[str]:
    """What could not be diagnosed, and which columns it would take."""
    said = []
    for what, names in NEEDS.items():
        absent = [name for name in names if name not in dump.columns]
        if absent:
            said.append(f"{what}: no {', no '.join(absent)}")
    if not any(len(rewards) > 1 for rewards in groups_of(dump).values()):
        said.append("groups of equal rewards: no reward and group, or no group of two completions")
    return said


def groups_of(dump: Dump) -> dict[str, list[float]]:
    """Rewards of each prompt's completions in each step."""
    groups: dict[str, list[float]] = {}
    for answer in dump.answers:
        if "group" in answer and "reward" in answer:
            groups.setdefault(f"{answer['step']}/{answer['group']}", []).append(answer["reward"])
    return groups


def dump_metrics(dump: Dump, clip: ClipConfig) -> Metrics:
    """Every metric whose columns are there."""
    columns, num_tokens = dump.columns, len(dump.step)
    mask = torch.ones(num_tokens, dtype=torch.bool)
    metrics: Metrics = {"num_tokens": num_tokens, "num_answers": len(dump.answers)}
    if not num_tokens:
        return metrics

    def have(*names: str) -> bool:
        return all(name in columns for name in names)

    if have(*NEEDS["the mismatch of rollout and training"]):
        old, rollout = columns["old_logprobs"], columns["rollout_logprobs"]
        metrics |= mismatch_metrics(old, rollout, mask) | mismatch_by_position(old, rollout, dump.positions)
    if have("entropy"):
        metrics |= entropy_metrics(columns["entropy"])
    tokens = ObservedTokens(
        loss_mask=mask,
        advantages=columns.get("advantages", torch.zeros(num_tokens, dtype=torch.float64)),
        entropy=columns.get("entropy", torch.zeros(num_tokens, dtype=torch.float64)),
        answer_index=dump.answer_index - dump.answer_index.min(),
    )
    if have("entropy", "advantages"):
        metrics |= answer_metrics(tokens)
    if have("old_logprobs", "logprobs"):
        metrics |= _change(columns, tokens, clip, ("old_logprobs", "logprobs"), STEP)
    if have(*NEEDS["the null line"]):
        metrics |= _change(columns, tokens, clip, ("logprobs", "null_logprobs"), NULL)
    groups = groups_of(dump).values()
    if any(len(rewards) > 1 for rewards in groups):
        parts = [group_metrics(torch.tensor([rewards])) for rewards in groups]
        metrics |= {key: sum(part[key] for part in parts) / len(parts) for key in parts[0]}
    return metrics


def _change(
    columns: dict[str, Tensor], tokens: ObservedTokens, clip: ClipConfig, names: tuple[str, str], area: str
) -> Metrics:
    """The figures of one change, as far as the columns go."""
    pairs = {
        numerics: LogprobPair(before=columns[prefix + names[0]], after=columns[prefix + names[1]])
        for numerics, prefix in (("fp8", ""), ("bf16", "shadow_"))
        if prefix + names[0] in columns and prefix + names[1] in columns
    }
    metrics: Metrics = {f"{area}/{key}": value for key, value in log_ratio_std(pairs, tokens.loss_mask).items()}
    if "advantages" not in columns:
        return metrics
    if area == STEP:
        ratio = torch.exp(pairs["fp8"].log_ratio)
        dropped = beyond(ratio, tokens.advantages, clip.bounds())
        metrics |= clip_metrics(dropped, ratio, tokens.advantages, tokens.loss_mask)
    if "bf16" not in pairs:
        return metrics
    compared = ratio_metrics(pairs, tokens, clip, area)
    if "entropy" not in columns:
        of_entropy = [k for k, v in compared.items() if isinstance(v, list) or k.endswith("high_entropy_answer_share")]
        compared = {key: value for key, value in compared.items() if key not in of_entropy}
    return metrics | compared
