"""One run against another: keys of the configuration and edges of the flow."""

from pathlib import Path

import pytest

from octavo.report.flow_against import against_lines
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import load_config
from octavo.trainer.precision import declared_flow

REPO = Path(__file__).resolve().parents[2]
FILE = """
output_dir: x
model: {{path: {model}}}
task: {{type: arithmetic}}
{more}
"""


@pytest.fixture
def write(tmp_path):
    def write_file(name, more=""):
        (tmp_path / name).write_text(FILE.format(model=REPO / "examples/tiny/model", more=more))
        return tmp_path / name

    return write_file


def test_keys_and_edges_that_differ_are_listed(write):
    config = load_config(TrainConfig, write("a.yaml", "optimizer: {lr: 0.1}\nprecision: {keep_bf16: [layers.1.*]}"))
    found = against_lines(config, declared_flow(config), write("b.yaml"))
    assert found[0].startswith("2 keys differ from ")
    assert found[1:3] == ["  precision.keep_bf16: ['layers.1.*'] / null", "  optimizer.lr: 0.1 / 1e-06"]
    assert found[3].startswith("1 groups of modules differ from ")
    assert "model.layers.1.mlp.down_proj: fprop X bf16 / e4m3 1x128 (rollout, old, train)" in found[4]


def test_equal_runs_differ_in_nothing_and_a_flow_file_has_no_keys(write, tmp_path):
    config = load_config(TrainConfig, write("a.yaml"))
    flow = declared_flow(config)
    assert [line[0] for line in against_lines(config, flow, write("b.yaml"))] == ["0", "0"]
    (tmp_path / "precision.json").write_text(flow.to_json())
    (line,) = against_lines(config, flow, tmp_path / "precision.json")
    assert line.startswith("0 groups of modules differ")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="--against .*other.json: not a precision flow"):
        against_lines(config, flow, tmp_path / "other.json")
