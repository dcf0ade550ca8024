"""Fixtures that every test may use."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

REPO = Path(__file__).resolve().parents[1]

# The tensors of these tests are tiny: more threads than this only wait for each other.
torch.set_num_threads(min(4, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def seed():
    """Every test starts from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def data_dir() -> Path:
    """The folder with one sub-folder a data set: OCTAVO_DATA, else ../shared/data beside the repository."""
    path = Path(os.environ.get("OCTAVO_DATA", REPO.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no data sets at {path}; name their folder in OCTAVO_DATA")
    return path
