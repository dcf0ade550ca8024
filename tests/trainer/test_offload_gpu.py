"""Moments on the host between updates, on a GPU: the same bits, and their memory free while the engine samples."""

import gc
import signal
import weakref

import pytest
import torch
from safetensors.torch import load_file
from training_runs import TINY_MODEL, resumable, same_run, signal_at, train_quietly

from octavo.bench.memory import full_run, random_model, train_beside_plan
from octavo.rollout.engine import Engine
from octavo.trainer import host_memory, loop
from octavo.trainer.host_memory import PinnedMemory
from octavo.trainer.interrupt import Interrupted
from octavo.trainer.memory_advice import with_changes
from octavo.trainer.offload import OffloadedMoments

pytestmark = pytest.mark.gpu

FORMATS = [{}, {"optimizer__state_format": "int8", "optimizer__master_format": "bf16"}]
QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
}


def on_gpu(folder, **settings):
    settings = {"trainer__num_steps": 3, "device": "cuda", "precision": {"recipe": "block128"}, **settings}
    return resumable(folder, **settings)


def allocated_in_rollouts(monkeypatch):
    """Bytes of torch's allocator as each rollout or evaluation begins; a list that grows."""
    found, generate = [], Engine.generate

    def told(*arguments, **keywords):
        gc.collect()
        found.append(torch.cuda.memory_allocated())
        return generate(*arguments, **keywords)

    monkeypatch.setattr(Engine, "generate", told)
    return found


def moment_bytes(folder):
    """Of the newest checkpoint."""
    newest = max(folder.glob("checkpoints/step_*"))
    tensors = [tensor for file in newest.glob("optimizer-*.safetensors") for tensor in load_file(file).items()]
    return sum(tensor.nbytes for name, tensor in tensors if not name.endswith(".step"))


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("formats", FORMATS)
def test_three_steps_have_the_same_masters_and_rollouts_the_memory(formats, lends, tmp_path, monkeypatch):
    taken = {}
    for name in ("plain", "moved"):
        with monkeypatch.context() as patch:
            taken[name] = allocated_in_rollouts(patch)
            more = {"rollout__engine__lend_memory": lends, "optimizer__offload_moments": name == "moved"}
            train_quietly(on_gpu(tmp_path / name, **formats, **more), tmp_path / "log")
        gc.collect()
    same_run(tmp_path / "moved", tmp_path / "plain")
    size = moment_bytes(tmp_path / "plain")
    assert len(taken["moved"]) == len(taken["plain"]) >= 4 and size > 2**20
    # the first evaluation and rollout come before torch's own moments are made
    less = [plain - moved for plain, moved in zip(taken["plain"], taken["moved"], strict=True)][2:]
    print(f"{size} B of moments; rollouts hold less by {less}")
    assert all(size <= each < 1.5 * size + 2**20 for each in less)


def test_a_critics_too(tmp_path):
    settings = {"algorithm": {"advantage": {"type": "gae"}}, "calibration": None}
    for name in ("plain", "moved"):
        critic = {"optimizer": {"lr": 1e-3, "offload_moments": name == "moved"}}
        config = on_gpu(tmp_path / name, **settings, critic=critic, optimizer__offload_moments=name == "moved")
        train_quietly(config, tmp_path / "log")
    same_run(tmp_path / "moved", tmp_path / "plain")


@pytest.mark.parametrize("formats", FORMATS)
def test_a_run_that_is_stopped_goes_on_with_or_without(formats, tmp_path, monkeypatch):
    config = on_gpu(tmp_path / "stopped", optimizer__offload_moments=True, **formats)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        signal_at(patch, loop, "annotate", 3, signal.SIGTERM)  # of the second step, with the moments on the host
        train_quietly(config, tmp_path / "log")
    config = with_changes(config, {"optimizer.offload_moments": False})
    train_quietly(config, tmp_path / "log", resume=True, allow_changes=True)
    train_quietly(on_gpu(tmp_path / "whole", **formats), tmp_path / "log")
    same_run(tmp_path / "stopped", tmp_path / "whole")


def test_a_move_copies_every_byte_and_frees_every_byte():
    shapes, types = [(4096, 1111), (3,), (5000,)], [torch.float32, torch.int8, torch.uint8]
    live = [torch.randint(0, 100, shape, device="cuda").to(dtype) for shape, dtype in zip(shapes, types, strict=True)]
    wanted = [x.cpu() for x in live]
    before = torch.cuda.memory_allocated()
    moments = OffloadedMoments(live)
    assert all(not x.is_cuda and x.is_pinned() and torch.equal(x, y) for x, y in zip(live, wanted, strict=True))
    assert before - torch.cuda.memory_allocated() >= sum(x.nbytes for x in live)
    for number in range(1, 4):
        moments.to_device()
        assert torch.cuda.memory_allocated() == before and all(x.is_cuda for x in live)
        live[0].add_(1.0)
        moments.to_host()
        assert torch.equal(live[0], wanted[0] + number) and all(map(torch.equal, live[1:], wanted[1:]))


def test_pages_are_unlocked_with_their_memory():
    memory = PinnedMemory(2**20)
    x = memory.tensor_like(torch.empty(2**18))
    assert x.is_pinned()
    gone = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is None and not x.is_pinned()


def test_a_host_without_room_stops_a_run_before_it_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "memory_bytes", lambda: (1000, 2000))
    with pytest.raises(ValueError, match=r"offload_moments=true needs \d+ bytes of the host's memory"):
        train_quietly(on_gpu(tmp_path / "run", optimizer__offload_moments=True), tmp_path / "log")
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_the_plan_of_a_run_that_moves_its_moments(num_mini_batches, tmp_path):
    model = random_model(tmp_path / "model", TINY_MODEL, QWEN3)
    keys = {"optimizer.offload_moments": True, "rollout.engine.lend_memory": True, "calibration": None}
    keys["trainer.num_mini_batches"] = num_mini_batches
    run = train_beside_plan(with_changes(full_run(model, tmp_path / "run", {"recipe": "block128"}), keys))
    phases = ("peak", "rollout", "old_logprobs", "update", "held")
    print(run.table())
    assert all(abs(run.off(phase)) <= 0.05 for phase in phases), f"\n{run.table()}"
