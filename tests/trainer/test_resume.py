"""Resume to the bit after Ctrl-C, SIGTERM and damage; what is refused; what a full disk or a NaN leaves."""

import hashlib
import json
import os
import resource
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from training_runs import in_a_child, read_lines, resumable, run, same_run, signal_at, train_quietly

from octavo.rollout.decode import DecodeSteps
from octavo.trainer import checkpoint, loop, rollout, train
from octavo.trainer.checkpoint import list_checkpoints, newest_checkpoint
from octavo.trainer.interrupt import Interrupted
from octavo.trainer.optimizer import Optimizer
from octavo.trainer.output import RunFolder
from octavo.trainer.resume import find_resume_point
from octavo.trainer.run import TRAINING


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(resumable(folder))
    return folder


@pytest.mark.parametrize(
    "owner, name, call, number, saved",
    [
        (DecodeSteps, "start", 3, signal.SIGINT, "step_000000"),  # in the evaluation before step 0
        (rollout, "sample", 2, signal.SIGINT, "step_000001"),  # in a rollout: before the step
        (loop, "annotate", 4, signal.SIGTERM, "step_000001"),  # in the old logprobs
        (Optimizer, "step", 3, signal.SIGTERM, "step_000002-before-evaluation"),  # updates end first
        (train, "evaluate", 2, signal.SIGINT, "step_000002-before-evaluation"),
        (Optimizer, "step", 5, signal.SIGINT, "step_000003"),
    ],
)
def test_a_signal_saves_the_run_at_once_and_resume_changes_no_bit(
    owner, name, call, number, saved, whole, tmp_path, monkeypatch
):
    config = resumable(tmp_path / "run", checkpoint__interval=0, checkpoint__keep_best=False)
    with monkeypatch.context() as patch:
        signal_at(patch, owner, name, call, number)
        with pytest.raises(Interrupted, match=f"saved in .*{saved};.*--resume") as stop:
            run(config)
    assert stop.value.exit_code == 128 + number
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == [saved]
    assert f"resuming from {tmp_path}/run/checkpoints/{saved}" in run(config, resume=True)
    same_run(tmp_path / "run", whole)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_stops_at_once(tmp_path, monkeypatch):
    def twice(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop, "accumulate", twice)
    with pytest.raises(KeyboardInterrupt):
        run(resumable(tmp_path / "run", evaluation__interval=0))


def delete(file):
    file.unlink()


def truncate(file):
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1)


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "name", ["policy-00000.safetensors", "optimizer-00000.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", [delete, truncate, flip_a_bit])
def test_a_damaged_checkpoint_is_set_aside_and_the_last_good_one_taken(name, damage, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/model")
    newest, good = list_checkpoints(tmp_path / "run")[:2]
    damage(newest / name)
    said = run(resumable(tmp_path / "run"), resume=True)
    assert f"resuming from {good}" in said
    assert f"damaged and set aside: {newest}/" in said and "step_000004" in newest.name
    same_run(tmp_path / "run", whole)
    (resume,) = read_lines(tmp_path / "run/resumes.jsonl")
    assert resume["step"] == 3 and resume["changes"] == []
    assert name == "manifest.json" or name in resume["message"]  # a flip in the manifest accuses another file
    assert (newest.parent / f"{newest.name}.damaged").is_dir()


def test_no_good_checkpoint_is_an_error_and_changes_nothing(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    for path in list_checkpoints(tmp_path / "run"):
        flip_a_bit(path / "policy-00000.safetensors")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="none of the . checkpoints .* is whole: .*policy-00000.*SHA-256"):
        run(resumable(tmp_path / "run"), resume=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_changed_config_is_listed_and_refused_unless_allowed(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    changed = resumable(tmp_path / "run", optimizer__lr=1e-5, trainer__num_steps=5, precision__recipe="w8a16")
    metrics = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="recipe: 'block128' -> 'w8a16'; optimizer.lr: 0.0002 -> 1e-05;.*num_steps: 4"):
        run(changed, resume=True)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == metrics
    assert "changed: optimizer.lr: 0.0002 -> 1e-05" in run(changed, resume=True, allow_changes=True)
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4] and lines[4]["optimizer/lr"] == 1e-5
    (resume,) = read_lines(tmp_path / "run/resumes.jsonl")
    assert "optimizer.lr: 0.0002 -> 1e-05" in resume["changes"]
    free = replace(changed, checkpoint=replace(changed.checkpoint, keep_last=1), overwrite=True)
    run(free, resume=True)


def test_other_problems_or_another_reference_are_refused(tmp_path):
    task = tmp_path / "data"
    task.mkdir()
    for split in ("train", "test"):
        rows = [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
        (task / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(resumable(tmp_path).model.path, tmp_path / "base")
    config = resumable(
        tmp_path / "run",
        task={"type": "gsm8k", "path": str(task), "instruction": ""},
        model__path=str(tmp_path / "base"),
        algorithm__kl__coefficient=0.01,
        trainer__num_steps=1,
        evaluation__interval=0,
    )
    run(config)
    (task / "train.jsonl").write_text((task / "train.jsonl").read_text().replace('"8"', '"9"'))
    with pytest.raises(ValueError, match="problems: not those of the run"):
        run(config, resume=True)
    (task / "train.jsonl").write_text((task / "train.jsonl").read_text().replace('"9"', '"8"'))
    run(config, resume=True)
    shutil.copytree(tmp_path / "run/model", tmp_path / "base", dirs_exist_ok=True)
    with pytest.raises(ValueError, match="reference bytes: not those of the run"):
        run(config, resume=True)
    folder = tmp_path / "run/checkpoints/step_000001"
    older = (folder / "state.json").read_text().replace("reference bytes", "reference weights")  # a hash of masters
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"bytes": len(older), "sha256": hashlib.sha256(older.encode()).hexdigest()}
    (folder / "state.json").write_text(older)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "no hash of the reference model's bytes" in run(config, resume=True)


def test_resume_where_no_checkpoint_is_starts_from_the_beginning(whole, tmp_path, monkeypatch):
    config = resumable(tmp_path / "run")
    assert "no checkpoint in" in run(config, resume=True)
    same_run(tmp_path / "run", whole)
    for name in ("checkpoints", "model"):
        shutil.rmtree(tmp_path / "run" / name)
    with pytest.raises(ValueError, match="holds an earlier run"):
        run(config)
    with pytest.raises(ValueError, match="optimizer.lr: 0.0002 -> 0.0"):
        run(resumable(tmp_path / "run", optimizer__lr=0.0), resume=True)
    run(config, resume=True)
    same_run(tmp_path / "run", whole)


def test_two_processes_do_not_share_a_folder(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    config = resumable(tmp_path / "run", overwrite=True)
    with train.RunFolder(tmp_path / "run") as folder:
        folder.lock()
        for resume in (True, False):
            with pytest.raises(ValueError, match="in use by another octavo process"):
                run(config, resume=resume)
    assert len(read_lines(tmp_path / "run/metrics.jsonl")) == 4
    run(config, resume=True)


def test_lost_lines_of_the_metrics_are_said(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    truncate(tmp_path / "run/metrics.jsonl")
    longer = resumable(tmp_path / "run", trainer__num_steps=5)
    assert "metrics.jsonl is not as it was left" in run(longer, resume=True, allow_changes=True)
    assert [line["step"] for line in read_lines(tmp_path / "run/metrics.jsonl")] == [0, 1, 2, 4]


def test_kept_checkpoints_are_the_last_and_the_best(tmp_path, monkeypatch):
    accuracies = iter([0.0, 0.1, 0.5, 0.3, 0.3, 0.2])
    monkeypatch.setattr(train, "evaluate", lambda run: {"eval/accuracy": next(accuracies), "eval/num_problems": 1.0})
    run(resumable(tmp_path / "run", trainer__num_steps=5, evaluation__interval=1, checkpoint__keep_last=1))
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step_000005", "step_000002"]


def test_a_disk_that_refuses_checkpoints_does_not_stop_the_run(whole, tmp_path):
    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**7, 10**7))  # policy 7 MB, optimiser 14 MB, model 4 MB
        train_quietly(config, tmp_path / "log")

    config = resumable(tmp_path / "run")
    assert in_a_child(limited) == 0
    log = (tmp_path / "log").read_text()
    assert log.count("could not be written") == 4 and "File too large" in log
    assert list((tmp_path / "run/checkpoints").iterdir()) == []
    assert [line["step"] for line in read_lines(tmp_path / "run/metrics.jsonl")] == [0, 1, 2, 3]
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "broken, where, tensor",
    [
        ("loss", "loss of microbatch 0", "advantages"),
        ("gradient", "gradient of optimiser step 2", "layers.1.down_proj.weight"),
        ("weight", "weight after optimiser step 2", "layers.0.qkv_proj.weight"),
        ("rollout", "rollout", "layers.0.o_proj.weight"),
        ("old", "loss of microbatch 0", "old_logprobs"),
        ("evaluation", "evaluation", "norm.weight"),
    ],
)
def test_what_is_not_finite_stops_with_a_diagnosis_and_keeps_the_checkpoint(
    broken, where, tensor, whole, tmp_path, monkeypatch
):
    config = resumable(tmp_path / "run", evaluation__interval=2 if broken == "evaluation" else 0)
    steps, annotate, sample, step = [0], loop.annotate, rollout.sample, Optimizer.step
    evaluate_pending = train.evaluate_pending

    def break_batch(run, reference, mini_batch, checks):
        steps[0] += 1
        if broken == "loss" and steps[0] == 3:
            mini_batch.microbatches[0].advantages[-1] = torch.nan
        annotated = annotate(run, reference, mini_batch, checks)
        if broken == "old" and steps[0] == 3:
            first = annotated.microbatches[0]
            first.old_logprobs[first.loss_mask] = torch.nan
        return annotated

    def break_evaluation(session):
        session.run.policy.norm.weight.data[0] = torch.nan
        session.run.policy.requantize_()
        return evaluate_pending(session)

    def break_rollout(run, problems, seed, first_index, on_completion):
        if broken == "rollout" and seed == run.seed(TRAINING, 1):
            run.policy.layers[0].o_proj.weight.data[0, 0] = torch.nan
            run.policy.requantize_()
        return sample(run, problems, seed, first_index, on_completion)

    def break_update(self):
        if broken == "gradient" and self.update == 2:
            self.parameters["layers.1.down_proj.weight"].grad[3, 4] = torch.inf
        if broken == "weight" and self.update == 2:
            weight = self.parameters["layers.0.qkv_proj.weight"]
            monkeypatch.setattr(self.adamw, "step", lambda: weight.data[0, 0].fill_(-torch.inf))
        return step(self)

    monkeypatch.setattr(loop, "annotate", break_batch)
    monkeypatch.setattr(rollout, "sample", break_rollout)
    if broken == "evaluation":
        monkeypatch.setattr(train, "evaluate_pending", break_evaluation)
    monkeypatch.setattr(Optimizer, "step", break_update)
    with pytest.raises(ValueError, match=f"step 1.*{where}.*{tensor}.*failure.*--resume") as error:
        run(config)
    assert "\n" not in str(error.value)
    diagnosis = json.loads((tmp_path / "run/failure/diagnosis.json").read_text())
    assert diagnosis["step"] == 1 and len(diagnosis["prompts"]) == (0 if broken == "evaluation" else 4)
    assert [(item["name"], item["num_nan"] + item["num_inf"]) for item in diagnosis["broken"]][0][0] == tensor
    assert (tmp_path / "run/failure/batch.safetensors").exists() == (broken not in ("rollout", "evaluation"))
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step_000001"]
    monkeypatch.undo()
    run(config, resume=True)
    assert len(read_lines(tmp_path / "run/metrics.jsonl")) == 4


def test_a_kill_before_the_first_line_leaves_a_folder_that_resume_begins_in(tmp_path, monkeypatch):
    config = resumable(tmp_path / "run", trainer__num_steps=1)

    def killed(folder, name, text):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train.RunFolder, "write", killed)
        run(config)
    assert (tmp_path / "run/metrics.jsonl").exists()
    assert "starting from the beginning" in run(config, resume=True)


def test_keys_that_came_after_the_checkpoint_had_their_defaults(whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "run")
    saved, damage = newest_checkpoint(tmp_path / "run")
    algorithm = saved.state["config"]["algorithm"]
    del algorithm["overlong"], algorithm["kl"]["placement"]
    monkeypatch.setattr("octavo.trainer.resume.newest_checkpoint", lambda folder: (saved, damage))

    def changes(**settings):
        with RunFolder(tmp_path / "run") as folder:
            return find_resume_point(folder, resumable(tmp_path / "run", **settings), allow_changes=False).changes

    assert changes() == []
    with pytest.raises(ValueError, match=r"differs from this one in algorithm.overlong.buffer_tokens: 0 -> 4\. Give"):
        changes(algorithm__overlong={"buffer_tokens": 4})
    algorithm["gone"] = 1  # a key of an older octavo
    with pytest.raises(ValueError, match="algorithm.gone: 1 -> absent"):
        changes()


def test_a_trained_model_without_a_checkpoint_is_not_cleared_by_a_resume(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="holds a trained model and no checkpoint.*overwrite=true without --resume"):
        run(resumable(tmp_path / "run"), resume=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_fewer_steps_than_are_done_are_refused(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(ValueError, match="has done 4 steps.*trainer.num_steps=3"):
        run(resumable(tmp_path / "run", trainer__num_steps=3), resume=True, allow_changes=True)


def test_the_learning_rate_ends_at_0_also_when_a_resume_changes_the_number_of_updates(tmp_path, monkeypatch):
    changes = {"optimizer__lr_schedule": "linear", "evaluation__interval": 0, "trainer__num_steps": 5}
    config = resumable(tmp_path / "run", trainer__num_mini_batches=4, **changes)
    with monkeypatch.context() as patch:
        signal_at(patch, rollout, "sample", 4, signal.SIGTERM)
        with pytest.raises(Interrupted):
            run(config)
    fewer = resumable(tmp_path / "run", trainer__num_mini_batches=2, **changes)  # 12 updates done, 4 to come
    run(fewer, resume=True, allow_changes=True)
    rates = [line["optimizer/lr"] for line in read_lines(tmp_path / "run/metrics.jsonl")]
    assert rates[3:] == pytest.approx([2e-4 * (1 - 13 / 16), 2e-4 * (1 - 15 / 16)])


def test_a_resume_that_is_stopped_at_once_keeps_the_checkpoint_that_it_came_from(whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "run")
    for path in list_checkpoints(tmp_path / "run")[:1]:
        shutil.rmtree(path)
    (good,) = list_checkpoints(tmp_path / "run")[:1]
    inode = good.stat().st_ino
    signal_at(monkeypatch, rollout, "sample", 1, signal.SIGTERM)
    with pytest.raises(Interrupted, match=f"saved in .*{good.name}"):
        run(resumable(tmp_path / "run"), resume=True)
    assert good.stat().st_ino == inode, "a kill between removing the old and naming the new would have left none"


def test_a_checkpoint_file_that_cannot_be_read_is_damage(whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "run")
    newest, good = list_checkpoints(tmp_path / "run")[:2]
    digest = checkpoint._sha256

    def failing(file):
        if file.parent == newest and file.name.startswith("optimizer"):
            raise OSError(5, "Input/output error", str(file))
        return digest(file)

    monkeypatch.setattr(checkpoint, "_sha256", failing)
    assert checkpoint.newest_checkpoint(tmp_path / "run")[0].path == good
    (line,) = checkpoint.newest_checkpoint(tmp_path / "run")[1]
    assert line == f"{newest}/optimizer-00000.safetensors cannot be read: Input/output error"


def test_a_model_that_the_disk_refuses_is_said_with_what_to_do(whole, tmp_path):
    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
        with pytest.raises(ValueError, match="end of the run could not be written .*File too large.*--resume goes on"):
            run(resumable(tmp_path / "run"), resume=True)

    shutil.copytree(whole, tmp_path / "run")
    model = (tmp_path / "run/model/model.safetensors").read_bytes()
    assert in_a_child(limited) == 0
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == model
    assert not (tmp_path / "run/model.partial").exists()
