"""Static activation scales, which every forward moves, over a resume and beside an evaluation."""

import signal
from dataclasses import replace

import pytest
from training_runs import read_lines, resumable, run, same_run, signal_at

from octavo.trainer import loop
from octavo.trainer.interrupt import Interrupted

TWO_FORWARDS = {"recipe": "tensorwise_static", "rollout": {"amax_margin": 2.0}, "allow_mismatch": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": TWO_FORWARDS},
        {"precision__recipe": "tensorwise_static", "algorithm__kl__coefficient": 0.01},
    ],
)
def test_static_scales_and_a_reference_resume_to_the_bit(changes, tmp_path, monkeypatch):
    config = resumable(tmp_path / "run", checkpoint__interval=0, checkpoint__keep_best=False, **changes)
    with monkeypatch.context() as patch:
        signal_at(patch, loop, "annotate", 4, signal.SIGTERM)  # after the rollout has moved the scales' amax
        with pytest.raises(Interrupted):
            run(config)
    run(config, resume=True)
    run(replace(config, output_dir=str(tmp_path / "whole")))
    same_run(tmp_path / "run", tmp_path / "whole")


def test_evaluation_leaves_no_trace_in_static_scales(tmp_path):
    lines = []
    for interval in (0, 1):
        folder = tmp_path / str(interval)
        run(resumable(folder, precision__recipe="tensorwise_static", evaluation__interval=interval))
        lines.append([line["policy/ratio_std"] for line in read_lines(folder / "metrics.jsonl")])
    assert lines[0] == lines[1] and min(lines[0]) > 0.0
