"""`python one_of_two_ranks.py RANK FILE`: a rank of two, with data of its own; prints what must be the same on both."""

import json
import sys

import torch
from verl_engines import CALIBRATION, actor_config, make_engine, start_process_group, two_updates

from octavo.plugins.verl.transfer import fingerprint


def main():
    rank = int(sys.argv[1])
    start_process_group(rank, 2, torch.distributed.FileStore(sys.argv[2], 2))
    actor = actor_config("octavo", {"calibration": CALIBRATION}, "calibrated")
    engine = make_engine(actor)
    for seed in (0, 100):
        metrics = two_updates(engine, actor, seed + 10 * rank)["metrics"]
    sent = list(engine.get_per_tensor_param()[0])
    found = {
        "bounds": [engine.calibrator.bounds.low, engine.calibrator.bounds.high],
        "num_positive": metrics["calibration/num_positive"],
        "num_tensors": len(sent),
        "sent": sum(fingerprint(tensor) for _, tensor in sent),
    }
    print("found", json.dumps(found))


if __name__ == "__main__":
    main()
