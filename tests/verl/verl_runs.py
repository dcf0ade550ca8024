"""verl.trainer.main_ppo on the tiny model of examples/, on a CPU: its files, its command, and what its log says."""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet

from octavo.tasks.arithmetic import ArithmeticConfig, draw_problem_text, running_totals

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
MODEL = REPO / "examples" / "tiny" / "model"

REWARD = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(re.findall("-?[0-9]+", solution_str)[-1:] == [ground_truth])
"""
"""As octavo's task of sums: the last integer of the answer is right."""


def prepare(folder):
    """The files that runs share: prompts, a reward, and a distribution named vllm, which verl asks for."""
    rng, config = random.Random(0), ArithmeticConfig()
    sums = [draw_problem_text(rng, config) for _ in range(64)]
    rows = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": str(running_totals(text)[-1])},
            "extra_info": {"index": index},
        }
        for index, text in enumerate(sums)
    ]
    shutil.copytree(MODEL, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "prompts.parquet")
    (folder / "reward.py").write_text(REWARD)
    shim = folder / "shim" / "vllm-0.32.0+cpu.dist-info"
    shim.mkdir(parents=True)
    (shim / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    (shim / "entry_points.txt").write_text("[vllm.general_plugins]\noctavo_cpu = vllm_on_cpu:register\n")


def environment(folder):
    """Variables for a process that runs verl here."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (folder / "shim", HERE, REPO))),
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
    """The command of a run: GRPO, four prompts a step with four answers each, two updates a step."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.rollout_is=token",
        f"data.train_files={folder}/prompts.parquet",
        f"data.val_files={folder}/prompts.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=32",
        "data.max_response_length=24",
        "data.dataloader_num_workers=0",
        "data.shuffle=False",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_micro_batch_size_per_gpu=16",
        f"{actor}.use_kl_loss=False",
        f"{actor}.use_torch_compile=False",
        f"{actor}.optim.lr=1e-4",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.fsdp_config.model_dtype=fp32",
        f"{rollout}.name=vllm",
        f"{rollout}.n=4",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=16",
        f"{rollout}.max_model_len=128",
        f"{rollout}.max_num_seqs=32",
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


def run(folder, output, overrides, timeout_s=600):
    """Run to the end; {step: metrics}. The log lies beside the output.

    Raises:
        AssertionError: verl failed, with the end of its log.
    """
    log = Path(f"{output}.log")
    with log.open("w") as file:
        code = subprocess.run(
            command(folder, output, overrides),
            env=environment(folder),
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        ).returncode
    text = log.read_text(errors="replace")
    assert code == 0, text[-4000:]
    return metrics_of(text)
