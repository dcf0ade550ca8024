"""Fixtures that every test may use."""

import datetime
import importlib.metadata
import importlib.util
import json
import os
import random
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

REPO = Path(__file__).resolve().parents[1]

# The tensors of these tests are tiny. Threads that wait for each other gain nothing on an idle machine, and beside
# another busy process they made the suite five times slower.
torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background jobs, and in whatever the tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)

if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and (count := torch.cuda.device_count()) > 1:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(worker.removeprefix("gw")) % count)  # a GPU each


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


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct that OCTAVO_SMOLLM2 names."""
    named = os.environ.get("OCTAVO_SMOLLM2")
    if not named:
        pytest.skip("OCTAVO_SMOLLM2 does not name the Hugging Face folder of SmolLM2-135M-Instruct")
    path = Path(named)
    assert (path / "config.json").is_file(), f"OCTAVO_SMOLLM2={named} is no Hugging Face folder"
    return path


def pytest_sessionfinish(session: pytest.Session) -> None:
    """After GPU tests, leave what ran and where: benchmarks/results/test_gpu.json, or under $OUT if that is set."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("markexpr") != "gpu" or reporter is None or not torch.cuda.is_available():
        return
    outcomes = [(outcome, report) for outcome in ("passed", "failed") for report in reporter.stats.get(outcome, [])]
    folder = Path(os.environ.get("OUT", REPO / "benchmarks/results"))
    folder.mkdir(parents=True, exist_ok=True)
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True, check=False)
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
        "commit": os.environ.get("OCTAVO_COMMIT") or git.stdout.strip() or "unknown",
        "command": "make test-gpu",
        "date": datetime.date.today().isoformat(),
        "rows": [
            {
                "case": report.nodeid,
                "metric": "passed",
                "value": int(outcome == "passed"),
                "unit": "bool",
                "goal": 1,
                "better": "higher",
                "note": f"{report.duration:.1f} s",
            }
            for outcome, report in outcomes
        ],
    }
    (folder / "test_gpu.json").write_text(json.dumps(result, indent=1) + "\n")
