"""Where moments lie and when they move; that neither this nor what raises in between changes a bit of them."""

import gc
import signal
import sys
from dataclasses import replace

import pytest
import torch
from fake_offload import FakeDevice
from training_runs import resumable, run, same_run, signal_at, tiny_config

from octavo import cli
from octavo.rollout.engine import Engine
from octavo.trainer import host_memory, loop, offload, rescue, train
from octavo.trainer.config_file import to_dict
from octavo.trainer.host_memory import PinnedMemory, require_room
from octavo.trainer.interrupt import Interrupted
from octavo.trainer.memory_held import memory_moves
from octavo.trainer.offload import OffloadedMoments
from octavo.trainer.optimizer import CompactAdamW, Optimizer, OptimizerConfig

FORMATS = [{}, {"optimizer__state_format": "int8", "optimizer__master_format": "bf16"}]


@pytest.fixture
def device(monkeypatch):
    found = FakeDevice(monkeypatch)
    yield found
    found.made.clear()
    gc.collect()
    assert not found.locked


def values(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def saved_moments(folder):
    return [file.read_bytes() for file in sorted(folder.glob("checkpoints/*/*optimizer-*.safetensors"))]


@pytest.mark.parametrize("formats", FORMATS)
def test_moments_are_there_for_updates_alone_and_change_nothing(formats, device, tmp_path, monkeypatch):
    seen = []

    def told(owner, name):
        original = getattr(owner, name)

        def telling(*arguments, **keywords):
            seen.append((name, device.made[0].on_host))
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, telling)

    for owner, *names in (
        (Engine, "generate"),
        (loop, "annotate", "accumulate"),
        (torch.optim.AdamW, "step"),
        (CompactAdamW, "step"),
        (train, "save_if_due"),
    ):
        for name in names:
            told(owner, name)
    settings = {"trainer__num_steps": 2, "checkpoint__interval": 2, "evaluation__interval": 1, **formats}
    run(resumable(tmp_path / "run", optimizer__offload_moments=True, **settings))
    generate, save = ("generate", True), ("save_if_due", True)
    # both halves of a step's update: torch's, which begins after the copy, and the compact one
    update = [("accumulate", True), ("step", False), ("step", False), ("accumulate", False), *[("step", False)] * 2]
    step = [generate, *[("annotate", True)] * 2, *update, generate, save]
    assert seen == [generate, *step, *step]
    run(resumable(tmp_path / "plain", **settings))
    assert len(device.made) == 1
    same_run(tmp_path / "run", tmp_path / "plain")
    assert saved_moments(tmp_path / "run") == saved_moments(tmp_path / "plain") != []


@pytest.mark.parametrize("owner, name, call", [(Engine, "generate", 3), (loop, "annotate", 3)])
@pytest.mark.parametrize("first", [True, False])
def test_a_run_goes_on_from_moments_of_either_place(first, owner, name, call, device, tmp_path, monkeypatch):
    settings = {"trainer__num_steps": 2, "evaluation__interval": 0, "rollout__max_completion_tokens": 8}
    config = resumable(tmp_path / "run", optimizer__offload_moments=first, **settings)
    call -= name == "generate"  # the second step's
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        signal_at(patch, owner, name, call, signal.SIGTERM)
        run(config)
    other = replace(config, optimizer=replace(config.optimizer, offload_moments=not first))
    assert "optimizer.offload_moments: " in run(other, resume=True, allow_changes=True)
    assert len(device.made) == 1
    run(resumable(tmp_path / "plain", **settings))
    same_run(tmp_path / "run", tmp_path / "plain")


def test_a_critic_has_its_own(device, tmp_path):
    settings = {"algorithm": {"advantage": {"type": "gae"}}, "calibration": None, "trainer__num_steps": 2}

    def with_critic(folder, offloads):
        critic = {"optimizer": {"lr": 1e-3, "offload_moments": offloads}}
        return resumable(folder, **settings, critic=critic, optimizer__offload_moments=offloads)

    run(with_critic(tmp_path / "plain", False))
    assert not device.made
    run(with_critic(tmp_path / "both", True))
    assert len(device.made) == 2 and all(each.on_host for each in device.made)
    same_run(tmp_path / "both", tmp_path / "plain")
    assert saved_moments(tmp_path / "both") == saved_moments(tmp_path / "plain") != []


def test_a_rollback_finds_them_on_the_device_and_leaves_them_on_the_host(device, tmp_path, monkeypatch):
    def broken(*arguments):
        calls.append([each.on_host for each in device.made])
        if len(calls) == 4:  # the second mini-batch of the second step
            raise loop.Diverged("loss of microbatch 0", {"logprobs": torch.tensor([float("nan")])})
        return accumulate(*arguments)

    def rolled_back(session, *arguments):
        roll_back(session, *arguments)
        calls.append([each.on_host for each in device.made])

    calls, accumulate, roll_back = [], loop.accumulate, rescue.roll_back
    monkeypatch.setattr(loop, "accumulate", broken)
    monkeypatch.setattr(train, "roll_back", rolled_back)
    settings = {"watch": {"action": "rollback", "margin_steps": 1}, "trainer__num_steps": 2, "evaluation__interval": 0}
    settings |= {"calibration": None, "trainer__shadow_interval": 0}
    run(resumable(tmp_path / "run", optimizer__offload_moments=True, **settings))
    step = [[True], [False]]
    assert calls == [*step, *step, [True], *step, *step]
    calls.clear()
    device.made.clear()
    run(resumable(tmp_path / "plain", **settings))
    assert not device.made
    same_run(tmp_path / "run", tmp_path / "plain")


def interrupted_at(line, work):
    """Whether KeyboardInterrupt came at this line of offload.py and of its device, counted as they run."""

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in (offload.__file__, sys.modules["fake_offload"].__file__):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == line:
                raise KeyboardInterrupt
        return trace

    count, before = [0], sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("then", ["to_host", "to_device"])
@pytest.mark.parametrize("work", ["to_host", "to_device"])
def test_an_exception_at_any_line_leaves_every_moment_whole(work, then, device):
    """Copies that were begun may still be made later, as on a GPU."""
    start, line, stopped = values((5, 7), (11,), (3,)), 0, True
    while stopped:
        line += 1
        live = [x.clone() for x in start]
        moments, wanted = OffloadedMoments(live), start
        if work == "to_host":
            moments.to_device()
            for x in live:
                x.add_(1)  # what the host has is old
            wanted = [x + 1 for x in start]
        stopped = interrupted_at(line, getattr(moments, work))
        assert all(map(torch.equal, live, wanted)), f"line {line}"
        getattr(moments, then)()
        assert all(map(torch.equal, live, wanted)), f"{then} after line {line}"
        assert moments.on_host == (then == "to_host")
        moments.to_device()
        assert all(map(torch.equal, live, wanted)), f"line {line}"
        assert not any(offload._lies_at(*place) for place in moments._places)
        for x in live:
            x.mul_(2)
        moments.to_host()
        assert all(torch.equal(x, 2 * y) for x, y in zip(live, wanted, strict=True)) and moments.on_host
    assert line > 20


def test_a_step_after_an_exception_in_the_middle_of_a_move_is_the_plain_one(device, monkeypatch):
    def made(**more):
        weights = {name: torch.nn.Parameter(x) for name, x in zip("ab", values((3, 300), (300,)), strict=True)}
        return weights, Optimizer(weights, OptimizerConfig(lr=0.1, **more), 9)

    (plain, by), (weights, optimizer) = made(), made(offload_moments=True)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        gradients = [torch.randn(x.shape, generator=generator) for x in plain.values()]
        for each, stepping in ((plain, by), (weights, optimizer)):
            for weight, gradient in zip(each.values(), gradients, strict=True):
                weight.grad = gradient.clone()
            stepping.step()
        for line in (seed + 20, 2 * seed + 25):  # some have left, others have not
            interrupted_at(line, optimizer.stow_moments)
        wanted = by.moments()
        assert all(torch.equal(x, wanted[name]) for name, x in optimizer.moments().items())
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


def test_a_device_without_room_leaves_moments_on_the_host(device, monkeypatch):
    def full(*arguments, **keywords):
        raise torch.cuda.OutOfMemoryError("no room")

    live = values(4, 5)
    moments, wanted = OffloadedMoments(live), [x.clone() for x in live]
    with monkeypatch.context() as patch, pytest.raises(torch.cuda.OutOfMemoryError):
        patch.setattr(torch, "empty_like", full)
        moments.to_device()
    assert moments.on_host and all(map(torch.equal, live, wanted))
    moments.to_device()
    assert not moments.on_host and all(map(torch.equal, live, wanted))


def test_what_a_checkpoint_restores_on_the_host_is_what_a_step_reads(device):
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = Optimizer({"w": weight}, OptimizerConfig(offload_moments=True), 4)
    for x in optimizer.moments().values():  # as `Checkpoint.copy_into`
        x.fill_(3.0)
    optimizer.restore(3)
    weight.grad = torch.ones(2, 2) * 0.5  # of norm 1, so not clipped
    optimizer.step()
    assert torch.allclose(optimizer.moments()["w.exp_avg"], torch.full((2, 2), 0.9 * 3.0 + 0.1 * 0.5))
    assert not optimizer.offloaded.on_host
    optimizer.restore(3)
    assert optimizer.offloaded.on_host


def test_pages_hold_each_tensor_apart_and_are_unlocked_in_the_end(device):
    memory = PinnedMemory(3 * 512)
    first, second = memory.tensor_like(torch.empty(2, 3)), memory.tensor_like(torch.empty(600, dtype=torch.int8))
    ((address, size),) = device.locked.items()
    assert size == 3 * 512 and (first.data_ptr(), second.data_ptr()) == (address, address + 512)
    assert first.shape == (2, 3) and first.dtype == torch.float32 and second.dtype == torch.int8
    with pytest.raises(AssertionError, match="does not fit into 1536 bytes"):
        memory.tensor_like(torch.empty(1))
    del memory
    gc.collect()
    assert not device.locked
    assert second.fill_(3).sum() == 1800  # the pages are there, if no longer locked


def test_a_host_without_room_is_said_in_one_line(device, monkeypatch):
    parts = {"AdamW": 61 * 2**30, "the critic's AdamW": 2**30}
    monkeypatch.setattr(host_memory, "memory_bytes", lambda: (20 * 2**30, 2**40))
    with pytest.raises(ValueError) as caught:
        require_room(parts)
    message = str(caught.value)
    assert "\n" not in message and f"needs {62 * 2**30} bytes of the host's memory (AdamW 61.00 GiB" in message
    assert f"where {20 * 2**30} (20.00 GiB) are free. Set it to false" in message
    monkeypatch.setattr(host_memory, "memory_bytes", lambda: (1000, 2000))
    with pytest.raises(ValueError, match="needs 1536 bytes.*where 1000"):
        OffloadedMoments(values(300))
    assert not device.locked


def test_pages_that_cuda_does_not_lock_are_refused(monkeypatch):
    runtime = type("Runtime", (), {"cudaHostRegister": staticmethod(lambda *_: 2)})
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(ValueError, match=r"could not lock 512 bytes .*cudaHostRegister returned 2"):
        PinnedMemory(512)


def test_segments_grow_and_shrink_where_memory_moves_on_a_gpu(tmp_path):
    def moves(**settings):
        return memory_moves(tiny_config(tmp_path, **settings))

    assert not moves(device="cuda") and not moves(optimizer__offload_moments=True)
    assert moves(device="cuda", optimizer__offload_moments=True)
    assert moves(device="cuda", rollout__engine__lend_memory=True)


def test_a_cpu_moves_nothing_and_says_so(tmp_path, monkeypatch, capsys):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    assert Optimizer({"weight": weight}, OptimizerConfig(offload_moments=True), 1).offloaded is None
    line = "offload_moments=true moves nothing on device='cpu'"
    settings = {"trainer__num_steps": 1, "evaluation__interval": 0}
    config = tiny_config(tmp_path / "run", optimizer__offload_moments=True, **settings)
    assert line in run(config)
    run(tiny_config(tmp_path / "plain", **settings))
    same_run(tmp_path / "run", tmp_path / "plain")
    monkeypatch.setattr("sys.argv", ["octavo", "describe", str(tmp_path / "run/config.yaml")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code in (None, 0) and line in capsys.readouterr().out
    assert to_dict(config)["optimizer"]["offload_moments"] is True
