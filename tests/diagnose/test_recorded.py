"""Dumps are judged as far as their columns go; numbers by hand, and a dump as verl would write it."""

import ast
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peer_functions import PEERS

from octavo.diagnose.diagnosis import findings_of
from octavo.diagnose.recorded import ALL, NEEDS, diagnose_dump
from octavo.rl.losses import ClipConfig
from octavo.rl.observatory import LogprobPair, ObservedTokens, ratio_metrics

REPO = Path(__file__).resolve().parents[2]
CLIP = ClipConfig()
ONE = {"old_logprobs": [-1.0, -1.0, -1.0, -1.0], "advantages": -1.0}


def diagnose(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return diagnose_dump([path], CLIP)


def full_rows(count: int = 40, noise: float = 0.3) -> list[dict]:
    """Rows with every column: BF16 moves a little, FP8 by noise besides, also after a null change."""
    generator = torch.Generator().manual_seed(0)

    def moved(values: torch.Tensor, amount: float) -> torch.Tensor:
        return values + amount * torch.randn(len(values), generator=generator)

    rows = []
    for answer in range(count):
        shadow_old = -2.5 - torch.rand(5 + answer % 7, generator=generator)
        shadow = moved(shadow_old, 0.1)
        old, now = moved(shadow_old, 0.05), moved(shadow, noise)
        tensors = {
            "rollout_logprobs": old,
            "old_logprobs": old,
            "logprobs": now,
            "shadow_old_logprobs": shadow_old,
            "shadow_logprobs": shadow,
            "null_logprobs": moved(now, noise),
            "shadow_null_logprobs": moved(shadow, 0.01),
            "entropy": 2.0 * torch.rand(len(old), generator=generator),
        }
        row = {name: values.tolist() for name, values in tensors.items()}
        row |= {"advantages": 1.0 if answer % 3 else -1.0, "reward": float(answer % 3 > 0)}
        rows.append({**row, "group": answer // 4, "step": answer // 20})
    return rows


def near(value, tolerance: float):
    """What a figure is compared with; counts, names and None exactly."""
    return pytest.approx(value, rel=tolerance, abs=tolerance) if isinstance(value, float) else value


def test_mismatch_by_hand(tmp_path):
    row = {"rollout_logprobs": [-1.0, -1.0, -1.0, -2.0], **ONE}
    found = diagnose(tmp_path / "a.jsonl", [row]).columns[ALL]
    assert found["mismatch/max_abs_logprob_diff"] == 1.0 and found["mismatch/outside_share"] == 0.25
    assert found["mismatch/max_abs_by_position"] == [0.0, 0.0, 1.0]
    assert "observed/log_ratio_std_fp8" not in found


def test_ratios_and_clipping_by_hand(tmp_path):
    ratios = [0.5, 0.9, 1.5, 0.7]
    row = {**ONE, "logprobs": [-1.0 + math.log(ratio) for ratio in ratios]}
    found = diagnose(tmp_path / "a.jsonl", [row]).columns[ALL]
    logs = torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64)
    assert found["observed/log_ratio_std_fp8"] == pytest.approx(logs.std(correction=0).item())
    assert (found["loss/clip_fraction_low"], found["loss/clip_fraction_high"]) == (0.5, 0.0)


def test_a_whole_dump_has_the_figures_of_its_tokens(tmp_path):
    rows = full_rows()
    diagnosis = diagnose(tmp_path / "a.jsonl", rows)
    found = diagnosis.columns[ALL]

    def column(name):
        return torch.tensor([x for row in rows for x in row[name]], dtype=torch.float64)

    lengths = torch.tensor([len(row["logprobs"]) for row in rows])
    index = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    tokens = ObservedTokens(
        loss_mask=torch.ones(len(index), dtype=torch.bool),
        advantages=torch.tensor([row["advantages"] for row in rows])[index],
        entropy=column("entropy"),
        answer_index=index,
    )
    pairs = {
        "fp8": LogprobPair(before=column("old_logprobs"), after=column("logprobs")),
        "bf16": LogprobPair(before=column("shadow_old_logprobs"), after=column("shadow_logprobs")),
    }
    expected = ratio_metrics(pairs, tokens, CLIP)
    assert {key: found[key] for key in expected} == expected and expected["observed/num_clipped_fp8"] > 20
    assert found["null/log_ratio_std_fp8"] == pytest.approx(0.3, rel=0.2)
    assert found["null/log_ratio_std_bf16"] == pytest.approx(0.01, rel=0.2)
    assert list(diagnosis.columns) == [ALL, "step 0", "step 1"] and diagnosis.missing == []
    assert sum(diagnosis.columns[f"step {s}"]["num_tokens"] for s in (0, 1)) == found["num_tokens"] == len(index)
    # groups of four answers with rewards 0 1 1 0, 1 1 0 1, 1 0 1 1: none is equal
    assert (found["reward/all_right_groups_share"], found["reward/all_wrong_groups_share"]) == (0.0, 0.0)
    assert found["answers/high_entropy_share"] > 0.0


def test_padding_and_order_change_nothing(tmp_path):
    rows = full_rows()
    padded = []
    for row in reversed(rows):
        junk = {name: [-9.0, *values, -9.0, float("nan")] for name, values in row.items() if isinstance(values, list)}
        mask = [0] + [1] * len(row["logprobs"]) + [0, 0]
        padded.append({**row, **junk, "response_mask": mask})
    plain, other = (diagnose(tmp_path / f"{n}.jsonl", r).columns[ALL] for n, r in (("a", rows), ("b", padded)))
    assert plain.keys() == other.keys()
    for key in plain.keys() - {"mismatch/max_abs_by_position", "mismatch/mean_abs_by_position"}:
        assert other[key] == near(plain[key], 1e-9), key


@pytest.mark.parametrize("column", sorted({name for names in NEEDS.values() for name in names}))
def test_what_is_missing_is_said_and_the_rest_is_diagnosed(tmp_path, column):
    rows = [{name: value for name, value in row.items() if name != column} for row in full_rows(8)]
    diagnosis = diagnose(tmp_path / "a.jsonl", rows)
    wanted = [what for what, names in NEEDS.items() if column in names]
    assert [sentence.partition(":")[0] for sentence in diagnosis.missing] == wanted
    assert all(f"no {column}" in sentence for sentence in diagnosis.missing)
    whole = diagnose(tmp_path / "b.jsonl", full_rows(8)).columns[ALL]
    found = diagnosis.columns[ALL]
    assert found == {key: whole[key] for key in found} and 5 < len(found) < len(whole)


def test_findings_say_what_to_do(tmp_path):
    loud = [finding.do for finding in diagnose(tmp_path / "a.jsonl", full_rows(200)).findings]
    assert any("w8a16" in do for do in loud) and any("less noise" in do or "Calibrate" in do for do in loud)
    calm = diagnose(tmp_path / "b.jsonl", full_rows(200, noise=0.01)).findings
    assert [finding.do for finding in calm] == ["", "", ""] and "to the bit" in calm[0].says


@pytest.mark.parametrize("step, null, said", [(0.5, 0.24, True), (0.5, 0.26, False), (0.15, 0.01, False)])
def test_a_step_that_fp8_makes_larger_is_said(step, null, said):
    metrics = {"num_tokens": 5000, "observed/log_ratio_std_fp8": step, "observed/log_ratio_std_bf16": 0.1}
    metrics |= {"null/log_ratio_std_fp8": null, "null/log_ratio_std_bf16": null}
    found = [finding for finding in findings_of({"block128": metrics}, "") if "larger than it is" in finding.says]
    assert bool(found) is said and all("dither_masters" in finding.do for finding in found)


@pytest.mark.parametrize("row", [{**ONE, "response_mask": [0, 0, 0, 0]}, {"old_logprobs": [], "rollout_logprobs": []}])
def test_rows_without_a_loss_token_are_refused(tmp_path, row):
    with pytest.raises(ValueError, match="no row has a token in the loss"):
        diagnose(tmp_path / "a.jsonl", [row])


@pytest.mark.parametrize("steps, grouped", [((3, 3), True), ((3, 4), False)])
def test_a_group_is_of_one_step(tmp_path, steps, grouped):
    rows = [{**ONE, "group": "a", "reward": 1.0, "step": step} for step in steps]
    diagnosis = diagnose(tmp_path / "a.jsonl", rows)
    assert diagnosis.columns[ALL].get("reward/all_right_groups_share") == (1.0 if grouped else None)
    assert any(said.startswith("groups of equal rewards") for said in diagnosis.missing) is not grouped


def snippet(number: int) -> str:
    """A Python block of docs/diagnose.md."""
    text = (REPO / "docs/diagnose.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)[number]


def verl_batch(rows: list[dict]) -> SimpleNamespace:
    """What verl's trainer holds of these rows: tensors padded on the right, and the prompts' ids."""
    longest = max(len(row["logprobs"]) for row in rows)

    def padded(name):
        return torch.tensor([row[name] + [0.0] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["logprobs"]) + [0] * (longest - len(row["logprobs"])) for row in rows])
    tensors = {"rollout_log_probs": padded("rollout_logprobs"), "old_log_probs": padded("old_logprobs")}
    tensors |= {"advantages": mask * torch.tensor([row["advantages"] for row in rows])[:, None], "response_mask": mask}
    uids = torch.tensor([row["group"] for row in rows])
    return SimpleNamespace(batch=tensors, non_tensor_batch={"uid": uids}), padded


def test_verls_own_dump_with_the_documented_lines(tmp_path):
    """Its writer from its source, the lines of the docs before it."""
    source = PEERS / "verl/verl/trainer/ppo/ray_trainer.py"
    if not source.is_file():
        pytest.skip(f"{source} is not there; PEERS names the folder that holds verl")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (writer,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_write_generations"]
    writer.decorator_list = []
    known = {"os": os, "json": json}
    exec(compile(ast.Module(body=[writer], type_ignores=[]), str(source), "exec"), known)

    rows = full_rows(16)
    batch, padded = verl_batch(rows)
    after = SimpleNamespace(batch={"old_log_probs": padded("logprobs"), "entropys": padded("entropy")})
    trainer = SimpleNamespace(_compute_old_log_prob=lambda batch: (after, 0.0))
    extra: dict = {}
    exec(snippet(0), {"self": trainer, "batch": batch, "reward_extra_infos_to_dump": extra})
    texts, scores = ["a"] * 16, [row["reward"] for row in rows]
    known["_write_generations"](texts, texts, texts, scores, extra, str(tmp_path / "dumps"), 7)

    diagnosis = diagnose_dump([tmp_path / "dumps"], CLIP)
    ours = {"rollout_logprobs", "old_logprobs", "logprobs", "advantages", "entropy", "reward", "group", "step"}
    expected = diagnose(tmp_path / "ours.jsonl", [{k: v for k, v in row.items() if k in ours} for row in rows])
    found = diagnosis.columns[ALL]
    assert found.keys() == expected.columns[ALL].keys() and found["num_tokens"] > 100
    for key, value in expected.columns[ALL].items():
        assert found[key] == near(value, 1e-6), key
    assert diagnosis.facts["not read"] == "input, output, gts"


def test_a_saved_dataproto_becomes_a_dump(tmp_path, monkeypatch):
    rows = full_rows(6)
    batch, _ = verl_batch(rows)

    class DataProto:
        @staticmethod
        def load_from_disk(path):
            assert path == "gen_batch.dp"
            return batch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "verl", SimpleNamespace(DataProto=DataProto))
    exec(snippet(1), {})
    found = diagnose_dump([tmp_path / "logprobs.jsonl"], CLIP).columns[ALL]
    assert found["num_tokens"] == sum(len(row["logprobs"]) for row in rows)
    assert found["mismatch/max_abs_logprob_diff"] == 0.0
