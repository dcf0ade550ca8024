"""What the shell offers, and that it does not load torch for it."""

import subprocess
import sys
from pathlib import Path

from octavo.trainer.completion import complete_config, complete_override, config_keys
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_reference import sections

REPO = Path(__file__).resolve().parents[2]


def test_the_keys_are_those_of_the_config_classes():
    wanted = set()
    for section in sections(TrainConfig):
        wanted |= {key for key, *_ in section.keys() if "[]" not in key}
        if section.variant is not None:
            wanted.add(f"{section.path}.type")
    assert set(config_keys()) == wanted
    assert {"optimizer.lr", "rollout.engine.page_size", "task.type", "task.path", "calibration.interval"} <= wanted


def test_a_key_is_offered_with_its_text():
    offered = dict(complete_override("optimizer.l"))
    assert offered["optimizer.lr="] == "Peak learning rate."
    assert all(key.startswith("optimizer.l") for key in offered) and len(offered) >= 2
    assert complete_override("nothing.of.the.kind") == []


def test_yaml_files_and_folders_are_offered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("a.yaml", "b.yml", "c.txt", "runs/mine.yaml"):
        (tmp_path / name).write_text("")
    assert complete_config("") == ["a.yaml", "b.yml", "runs/"]
    assert complete_config("a") == ["a.yaml"]
    assert complete_config("runs/") == ["runs/mine.yaml"]
    assert complete_config(f"{tmp_path}/runs/m") == [f"{tmp_path}/runs/mine.yaml"]


def test_help_and_completion_import_no_torch():
    code = (
        "import sys; from octavo import cli; from octavo.trainer.completion import complete_override;"
        "assert complete_override('optimizer.'); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True, timeout=60)
