"""verl 0.9.1 with vLLM on one GPU, GRPO on GSM8K in three precisions: mismatch, seconds by phase, reward, bounds.

    PYTHONPATH=. python benchmarks/verl_gsm8k.py bf16 --model MODEL --data ../shared/data/gsm8k     and mixed, unified

    bf16      training and rollout in BF16
    mixed     training in BF16; verl quantises the weights for vLLM's block FP8
    unified   octavo's engine in block128, vLLM on the same bytes, calibrated bounds

Each arm is a run of `verl.trainer.main_ppo`, three to five minutes on an H200, most of them to start; all three without
a name. Rows go to benchmarks/results/verl_gsm8k.json (under $OUT if set), where arms that were measured at the same
commit on the same device are kept and not run again. What verl says is in OUTPUT/ARM.log, its metrics in ARM.jsonl.

--tiny tries it on a CPU, in the environment of make test-verl, on an untrained model, and leaves no result file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from octavo.bench.results import Results, Row
from octavo.tasks.gsm8k import GSM8KConfig

REPO = Path(__file__).resolve().parents[1]
FP8_ROLLOUT = ["actor_rollout_ref.rollout.quantization=fp8"]
UNIFIED = [
    *FP8_ROLLOUT,
    "actor_rollout_ref.actor.strategy=octavo",
    "actor_rollout_ref.actor.fsdp_config._target_=octavo.plugins.verl.EngineConfig",
    "+actor_rollout_ref.actor.fsdp_config.octavo.recipe=block128",
    "+actor_rollout_ref.actor.fsdp_config.octavo.calibration.type=exact",
    "+actor_rollout_ref.actor.fsdp_config.octavo.calibration.interval=1",
    "actor_rollout_ref.actor.policy_loss.loss_mode=calibrated",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=octavo.plugins.verl.worker.WorkerExtension",
]
ARMS = {
    "bf16": ("bf16+bf16", []),
    "mixed": ("bf16+fp8", FP8_ROLLOUT),
    "unified": ("block128+same bytes", UNIFIED),
}
"""By the word on the command line: training + rollout, and what the arm adds to `SETTINGS`."""

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "octavo.plugins.verl.registration",  # octavo need not be installed
    "VLLM_USE_DEEP_GEMM": "0",  # CUTLASS instead: nothing is compiled, and scales are taken as they are
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # may be absent
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # a virtual machine whose memory grows looks full to it
    "TOKENIZERS_PARALLELISM": "false",
}
"""Set where they are not."""

SETTINGS = """
algorithm.adv_estimator=grpo
algorithm.rollout_correction.rollout_is=token
data.train_batch_size=32
data.max_prompt_length=384
data.max_response_length=512
data.dataloader_num_workers=0
data.shuffle=False
actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.model.enable_gradient_checkpointing=False
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.ppo_mini_batch_size=16
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.n=8
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.gpu_memory_utilization=0.3
actor_rollout_ref.rollout.enforce_eager=True
actor_rollout_ref.rollout.free_cache_engine=False
+actor_rollout_ref.rollout.enable_sleep_mode=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.rollout.max_model_len=896
actor_rollout_ref.rollout.calculate_log_probs=True
actor_rollout_ref.rollout.agent.num_workers=4
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
reward.num_workers=2
trainer.n_gpus_per_node=1
trainer.nnodes=1
trainer.total_epochs=100
trainer.logger=["console","file"]
trainer.val_before_train=False
trainer.test_freq=-1
trainer.save_freq=-1
trainer.resume_mode=disable
+ray_kwargs.ray_init.num_gpus=1
ray_kwargs.ray_init.num_cpus=48
+ray_kwargs.ray_init.include_dashboard=False
+ray_kwargs.ray_init.object_store_memory=2000000000
""".split()
"""What the arms share; two updates a step. CUDA graphs would take longer to capture than they save in a few steps."""

TINY = """
data.train_batch_size=16
data.max_prompt_length=32
data.max_response_length=24
actor_rollout_ref.actor.ppo_mini_batch_size=8
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
actor_rollout_ref.actor.optim.lr=1e-3
actor_rollout_ref.rollout.n=4
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
actor_rollout_ref.rollout.max_model_len=128
actor_rollout_ref.rollout.max_num_batched_tokens=512
actor_rollout_ref.rollout.agent.num_workers=1
reward.num_workers=1
trainer.device=cpu
ray_kwargs.ray_init.object_store_memory=500000000
""".split()
"""Instead, on a CPU."""

PHASES = {
    "gen": "rollout_s",
    "old_log_prob": "old_logprobs_s",
    "update_actor": "update_s",
    "update_weights": "weights_s",
    "step": "step_s",
}
"""verl's timers and our names; reward and advantages pass beside the rollout or in no time."""

INSTRUCTION = ' Let\'s think step by step and output the final answer after "####".'
"""verl's own, whose check of openai/gsm8k reads what stands there."""


def absent(on_gpu: bool) -> str:
    """What a run needs and is not here, by name; empty where all is."""
    modules = {"verl": "verl", "ray": "ray", "vllm": "vLLM", "transfer_queue": "TransferQueue"}
    names = [name for module, name in modules.items() if importlib.util.find_spec(module) is None]
    return ", ".join([*names, *(["a GPU"] if on_gpu and not torch.cuda.is_available() else [])])


def write_prompts(data: str, path: Path) -> None:
    """The training problems of GSM8K as verl reads them, a line each.

    Raises:
        ValueError: no folder with train.jsonl.
    """
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": problem.text + INSTRUCTION}],
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": index},
        }
        for index, problem in enumerate(GSM8KConfig(path=data).build().train)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def quoted(path: str | Path) -> str:
    """A path as Hydra takes it, whatever is in it."""
    return "'" + str(path).replace("'", "\\'") + "'"


def command(model: str, prompts: Path, steps: int, overrides: Sequence[str]) -> list[str]:
    """The command of a run; later overrides win."""
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        *SETTINGS,
        f"actor_rollout_ref.model.path={quoted(model)}",
        f"data.train_files={quoted(prompts)}",
        f"data.val_files={quoted(prompts)}",
        f"trainer.total_training_steps={steps}",
        *overrides,
    ]


def run(words: Sequence[str], environment: dict[str, str], log: Path, timeout_s: float) -> str:
    """Run to the end, or to the time limit; why it did not end well, or nothing. All its processes are gone then."""
    with log.open("w") as file:
        process = subprocess.Popen(
            words, env=environment, cwd=log.parent, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"stopped after {timeout_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"ended with status {status}" if status else ""


def read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """{step: metrics} of verl's file logger, whose last line a kill may have cut."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            step = json.loads(line)
            found[step["step"]] = step["data"]
    return found


def figures(metrics: dict[int, dict[str, Any]]) -> list[tuple[str, float, str]]:
    """Name, value and unit: means over all steps, medians of seconds without the first, bounds at the end.

    Raises:
        ValueError: verl has not logged one of them.
    """
    steps = [metrics[step] for step in sorted(metrics)]
    warm = steps[1:] or steps

    def mean(key: str) -> float:
        values = [step.get(key) for step in steps]
        if any(value is None for value in values):
            raise ValueError(f"verl's metrics are to have {key} in each step; they have {values}")
        return statistics.fmean(values)

    found = [
        ("k3", mean("rollout_corr/k3_kl"), "nats"),
        ("kl", mean("rollout_corr/kl"), "nats"),
        ("probability_diff", mean("training/rollout_probs_diff_mean"), "mean |p - q|"),
        ("reward", mean("critic/rewards/mean"), "mean"),
        ("completion_tokens", mean("response_length/mean"), "tokens"),
        ("clip_fraction", mean("actor/pg_clipfrac"), "share"),
    ]
    for timer, name in PHASES.items():
        found.append((name, statistics.median(step[f"timing_s/{timer}"] for step in warm), "s"))
    found.append(("first_step_s", steps[0]["timing_s/step"], "s"))
    if "actor/calibration/low" in steps[-1]:
        found += [(f"clip_{side}_end", steps[-1][f"actor/calibration/{side}"], "ratio") for side in ("low", "high")]
        skipped = sum(step["actor/calibration/is_skipped"] for step in steps)
        found.append(("calibrations", len(steps) - skipped, f"of {len(steps)} steps"))
    return found


def case_of(model: str, arm: str) -> str:
    """What the rows of an arm are called."""
    return f"verl/{Path(model).name.lower()}/{ARMS[arm][0]}"


def measure(results: Results, arm: str, args: argparse.Namespace, prompts: Path, overrides: Sequence[str]) -> None:
    """Run an arm and add its rows.

    Raises:
        ValueError: it left fewer than two steps; with the end of its log.
    """
    log, lines = args.output / f"{arm}.log", args.output / f"{arm}.jsonl"
    lines.unlink(missing_ok=True)
    environment = ENVIRONMENT | args.environment | {"VERL_FILE_LOGGER_PATH": str(lines)}
    print(f"{arm}: {args.steps} steps, at most {args.timeout_s:.0f} s; its log: {log}", flush=True)
    begun = time.monotonic()
    problem = run(
        command(args.model, prompts, args.steps, [*overrides, *ARMS[arm][1]]), environment, log, args.timeout_s
    )
    seconds, metrics = time.monotonic() - begun, read_metrics(lines)
    if len(metrics) < min(2, args.steps):
        end = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-40:])
        raise ValueError(f"{end}\n{arm}: verl {problem or 'ended'} with {len(metrics)} of {args.steps} steps")
    case, mixed = case_of(args.model, arm), case_of(args.model, "mixed")
    note = f"{len(metrics)} of {args.steps} steps{f', {problem}' if problem else ''}"
    k3 = {row.case: row.value for row in results.rows if row.metric == "k3"}
    for metric, value, unit in [*figures(metrics), ("whole_run_s", seconds, "s")]:
        goal = 0.5 * k3[mixed] if metric == "k3" and arm == "unified" and mixed in k3 else None
        better = "higher" if metric in ("reward", "calibrations") else "lower"
        results.add(Row(case=case, metric=metric, value=value, unit=unit, goal=goal, better=better, note=note))


def prepare_tiny(args: argparse.Namespace, folder: Path) -> list[str]:
    """Model, prompts, reward and environment of tests/verl; the overrides for them."""
    sys.path.insert(0, str(REPO / "tests" / "verl"))
    from verl_runs import environment, prepare

    prepare(folder)
    external = f"verl_on_cpu,{ENVIRONMENT['VERL_USE_EXTERNAL_MODULES']}"
    args.environment = environment(folder) | {"VERL_USE_EXTERNAL_MODULES": external}
    args.model = str(folder / "model")
    reward = "reward.custom_reward_function"
    return [*TINY, f"{reward}.path={quoted(folder / 'reward.py')}", f"{reward}.name=compute_score"]


def main() -> int:
    """The arms that are asked for, one after the other; 0, or 2 with a line that says why."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", metavar="ARM", help=f"{', '.join(ARMS)}; default all")
    parser.add_argument("--model", help="folder of a dense Qwen2, Qwen3 or Llama, as Qwen2.5-Coder-0.5B-Instruct")
    parser.add_argument("--data", help="folder with GSM8K's train.jsonl or train.jsonl.gz")
    parser.add_argument("--steps", type=int, default=4, help="steps of each arm (4)")
    parser.add_argument("--timeout-s", type=float, default=420.0, help="for each arm (420); steps done by then count")
    parser.add_argument("--output", type=Path, default=Path("runs/verl_gsm8k"), help="logs (runs/verl_gsm8k)")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, an untrained model, without a result file")
    args = parser.parse_args()
    arms = args.arms or list(ARMS)
    if unknown := set(arms) - set(ARMS):
        parser.error(f"arms are {', '.join(ARMS)}; got {', '.join(sorted(unknown))}")
    if args.steps < 1 or args.timeout_s <= 0:
        parser.error(f"--steps and --timeout-s are above 0; got {args.steps} and {args.timeout_s:g}")
    if not args.tiny and not (args.model and args.data):
        print("verl_gsm8k: skipped; it wants --model MODEL --data GSM8K, or --tiny")
        return 0
    if missing := absent(on_gpu=not args.tiny):
        print(f"verl_gsm8k: a run needs {missing}, not to be found here; docs/verl.md, 'On one GPU'", file=sys.stderr)
        return 2
    try:
        measure_all(arms, args)
    except (OSError, ValueError) as error:
        print(f"verl_gsm8k: {error}", file=sys.stderr)
        return 2
    return 0


def measure_all(arms: Sequence[str], args: argparse.Namespace) -> None:
    """Files that the runs share, then the arms.

    Raises:
        ValueError: the data are not GSM8K's, or a run failed.
    """
    args.output = args.output.resolve()
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if args.tiny:
            prompts = Path(folder) / "prompts.parquet"
            overrides = prepare_tiny(args, Path(folder))
            os.environ["OUT"] = folder
        else:
            args.model, overrides = str(Path(args.model).resolve()), []
            if not (Path(args.model) / "config.json").is_file():
                raise ValueError(f"--model is a folder with config.json, weights and tokenizer; {args.model} is none")
            path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
            args.environment = {**os.environ, "PYTHONPATH": path}
            prompts = Path(folder) / "prompts.jsonl"
            write_prompts(args.data, prompts)
        results = Results("verl_gsm8k", f"PYTHONPATH=. python {' '.join(sys.argv)}", resume=True)
        for arm in arms:
            if results.has(case_of(args.model, arm)):
                print(f"{arm}: measured already at this commit on this device")
            else:
                measure(results, arm, args, prompts, overrides)


if __name__ == "__main__":
    sys.exit(main())
