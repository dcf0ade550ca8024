"""Fixtures of the tests of the trainer."""

import pytest
from run_configs import yaml_writer


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(text) puts it into run.yaml in the present folder and returns that name."""
    return yaml_writer(tmp_path, monkeypatch)
