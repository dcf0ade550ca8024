"""Fixtures of the tests of models."""

import pytest
from model_folders import folder_maker


@pytest.fixture
def make_folder(tmp_path):
    """make_folder(name, family, dtype, **changes) -> a folder with a tiny model in it, and the model."""
    return folder_maker(tmp_path)
