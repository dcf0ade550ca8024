"""benchmarks/export_agreement.py without vLLM: what it reads, what it compares, what it refuses."""

import json

import export_agreement as script
import pytest
import torch
from training_runs import TINY_MODEL

from octavo.bench import results


def test_distances_and_what_fp8_makes_by_itself():
    found, wanted, bf16 = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.25]), torch.tensor([-1.5, -1.25])
    mean, most = script.rows_of("case", found, wanted, bf16, "2 tokens")
    assert (mean.value, mean.goal, mean.met, mean.note) == (0.375, 0.5, True, "2 tokens; FP8 itself 0.5000")
    assert (most.metric, most.value, most.goal) == ("max_abs", 0.5, None)
    assert not script.rows_of("case", found - 1.0, wanted, bf16, "")[0].met


def test_log_probabilities_of_what_follows():
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0], [5.0, 5.0]])
    wanted = torch.stack([logits[0].log_softmax(0)[1], logits[1].log_softmax(0)[0]])
    assert torch.equal(script.chosen(logits, torch.tensor([0, 1, 0])), wanted)


def test_an_export_in_octavo_and_transformers(tmp_path, monkeypatch, capsys):
    (tmp_path / "gsm8k").mkdir()
    problem = {"problem": "3 + 4 = ", "solution": "7 " * 200}
    (tmp_path / "gsm8k" / "test.jsonl").write_text(json.dumps(problem) + "\n")
    monkeypatch.setenv("OCTAVO_DATA", str(tmp_path))
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(results, "_commit", lambda: "f00")
    find_spec = script.importlib.util.find_spec
    monkeypatch.setattr(
        script.importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find_spec(name, *rest)
    )
    monkeypatch.setattr(script, "MAX_TOKENS", 24)
    monkeypatch.setattr(script.sys, "argv", ["export_agreement.py", str(TINY_MODEL)])
    script.main()
    rows = results.read_results(tmp_path / "export_agreement.json")
    row = rows["export/model/transformers mean_abs"]
    assert list(rows) == ["export/model/transformers mean_abs", "export/model/transformers max_abs"]
    assert 0.0 < row.value < row.goal and row.note.startswith("23 tokens; FP8 itself 0.")
    assert "vLLM is not installed here" in capsys.readouterr().out
    monkeypatch.setenv("OCTAVO_DATA", str(tmp_path / "none"))
    with pytest.raises(SystemExit, match=r"none/gsm8k/test.jsonl is not there; set OCTAVO_DATA"):
        script.main()
