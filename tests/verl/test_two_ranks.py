import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl.trainer", reason="needs verl: make test-verl")

HERE = Path(__file__).resolve().parent


def test_bounds_and_bytes_are_the_same_on_every_rank(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parents[1]))),
        "OMP_NUM_THREADS": "1",
    }
    arguments = [sys.executable, str(HERE / "one_of_two_ranks.py")]
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank), str(tmp_path / "store")], env=environment, stdout=-1, stderr=-2, text=True
        )
        for rank in range(2)
    ]
    logs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], logs[0][-3000:] + logs[1][-3000:]
    first, second = (json.loads(log.rpartition("found ")[2].splitlines()[0]) for log in logs)
    assert first == second
    assert first["bounds"] != [0.6, 1.8]
    assert first["num_positive"] == [2 * 36.0]
