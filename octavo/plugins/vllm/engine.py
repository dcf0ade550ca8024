"""vLLM as the trainer's engine: the same call as `rollout.engine.Engine`, by vLLM's kernels, on octavo's bytes.

    train(config, display, vllm=VLLMEngine)         with rollout.engine: vllm

Before it samples, the engine publishes the decoder's weights if their policy_version has changed, and vLLM loads them:
once a rollout, however many optimiser steps came before. Whatever fails there stops the run; no rollout is sampled
from older weights than the trainer believes.
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.models.decoder import Decoder
from octavo.plugins.vllm.transfer_folder import TransferFolder
from octavo.plugins.vllm.weights import WORKER_EXTENSION, Receiver, publish
from octavo.rollout.counter import uniform_bits
from octavo.rollout.engine import MAX_GROUP_SIZE, Completion, check_request
from octavo.rollout.sampler import SamplingConfig, check_finite
from octavo.rollout.vllm_config import VLLMConfig, supported_release
from octavo.trainer.config import TrainConfig
from octavo.trainer.errors import reason
from octavo.trainer.progress import random_states_to_json, restore_random_states


class VLLMEngine:
    """Generates completions with vLLM, in this process, from the decoder's current weights.

    Args:
        config: of the run; `rollout.engine` is a VLLMConfig.
        decoder: shared with the trainer; its recipe is the rollout's in all that concerns weights.
        stop_token_ids: each ends a completion.
        say: told in a line what was started.

    Raises:
        ValueError: vLLM is missing or of another release, refuses the model or does not start; `transfer_dir` cannot
            hold the weights; or a layer is not as declared.
    """

    def __init__(
        self, config: TrainConfig, decoder: Decoder, stop_token_ids: Sequence[int], say: Callable[[str], None]
    ) -> None:
        assert isinstance(config.rollout.engine, VLLMConfig), config.rollout.engine
        self.decoder, self.stop_token_ids = decoder, frozenset(stop_token_ids)
        self.source, self.settings = config.model.path, config.rollout.engine
        release = supported_release()
        self._folder = TransferFolder(self.settings.transfer_dir)
        first = self._publish()
        self._folder.check_room(first)
        random_states = random_states_to_json()
        llm = self._start(config, first)
        restore_random_states(random_states)  # vLLM seeds the global generators
        weakref.finalize(self, llm.llm_engine.engine_core.shutdown)  # its workers go with it
        self.receiver = Receiver(llm, served=first)
        say(f"rollout: vLLM {release}; {layers_line(decoder, self.receiver.layers)}")

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingConfig,
        *,
        max_completion_tokens: int,
        group_size: int = 1,
        seed: int = 0,
        first_index: int = 0,
        progress: Callable[[int], None] | None = None,
        on_completion: Callable[[int, int, Completion], None] | None = None,
    ) -> list[list[Completion]]:
        """As `Engine.generate`, with two differences.

        vLLM's sums depend on what else is in a batch, so a seed gives the same completion only while they happen to be
        equal; and under a truncated distribution (evaluation) rollout_logprobs are that distribution's.

        Raises:
            ValueError: as there; the weights could not be handed over; or vLLM fails.
        """
        check_request(self.decoder, prompts, max_completion_tokens, group_size)
        self.follow()
        places = [(p, g) for p in range(len(prompts)) for g in range(group_size)]
        ids = [(first_index + p) * MAX_GROUP_SIZE + g for p, g in places]
        seeds = [uniform_bits(seed, sequence_id, 0) >> 1 for sequence_id in ids]  # vLLM's are signed, and not -1
        requests = [{"prompt_token_ids": list(prompts[p])} for p, _ in places]
        params = [self._params(sampling, max_completion_tokens, each) for each in seeds]
        completions: dict[tuple[int, int], Completion] = {}
        with self._enqueued(requests, params) as names:
            while self.receiver.llm.llm_engine.has_unfinished_requests():
                finished = self._step(progress)
                for output in finished:
                    index = names[output.request_id]
                    completions[places[index]] = found = _completion(output, (seed, ids[index]))
                    if on_completion is not None:
                        on_completion(*places[index], found)
                if progress is not None:
                    progress(len(finished))
        if len(completions) < len(places):
            raise ValueError(
                f"vLLM gave {len(completions)} of {len(places)} completions and says it has no more. --resume goes on "
                f"from the newest checkpoint"
            )
        return [[completions[p, g] for g in range(group_size)] for p in range(len(prompts))]

    def follow(self) -> None:
        """Hand the decoder's weights over, if vLLM serves others.

        Raises:
            ValueError: that failed; vLLM goes on with the version before if it can.
        """
        wanted, before = self.decoder.policy_version, self.receiver.served
        if wanted == self.receiver.policy_version:
            return
        try:
            self.receiver.load(self._publish())
        except ValueError as error:
            raise ValueError(
                f"{error}. No rollout of policy_version {wanted} is sampled; vLLM serves {self.receiver.policy_version}"
            ) from error
        if before is not None:
            shutil.rmtree(before)

    def _publish(self) -> Path:
        """The folder of the decoder's weights as they are."""
        version = self.decoder.policy_version
        folder = self._folder.path / f"policy_{version}"
        try:
            publish(self.decoder, folder, policy_version=version, source=self.source)
        except OSError as error:
            raise ValueError(
                f"the weights of policy_version {version} could not be written to rollout.engine.transfer_dir="
                f"{self.settings.transfer_dir!r}: {error.strerror}. Make room for two copies of them, or give another"
            ) from error
        self.source = str(folder)  # whose tokenizer files are those of the model
        return folder

    def _start(self, config: TrainConfig, folder: Path) -> Any:
        """vllm.LLM on a published folder."""
        settings, recipe = self.settings, self.decoder.recipe
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # requests are stepped here, where a stop is seen
        os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "1" if recipe.scale_rounding == "power_of_two" else "0")
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a trainer with threads cannot be forked
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        try:
            return LLM(
                model=str(folder),
                skip_tokenizer_init=True,
                dtype="bfloat16",
                kv_cache_dtype="fp8" if config.precision.rollout_recipe().kv_cache == "fp8" else "auto",
                max_model_len=self.decoder.max_tokens,
                max_num_seqs=settings.max_sequences,
                max_num_batched_tokens=settings.max_prefill_tokens,
                gpu_memory_utilization=settings.gpu_memory_utilization,
                tensor_parallel_size=settings.tensor_parallel_size,
                enforce_eager=not settings.cuda_graphs,
                generation_config="vllm",  # none of the model's own
                logprobs_mode="processed_logprobs",  # at the sampling temperature
                disable_log_stats=True,
                use_tqdm_on_load=False,
                worker_extension_cls=WORKER_EXTENSION,
            )
        except Exception as error:  # its own, of torch, of its kernels
            why = reason(error).rstrip(".")[:500]
            raise ValueError(f"vLLM does not start: {why}. Its settings are below rollout.engine") from error

    def _params(self, sampling: SamplingConfig, max_completion_tokens: int, seed: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed,
            max_tokens=max_completion_tokens,
            ignore_eos=True,  # stop_token_ids has them
            stop_token_ids=sorted(self.stop_token_ids),
            logprobs=0,  # of the sampled token alone
            detokenize=False,
        )

    @contextmanager
    def _enqueued(self, requests: Sequence[Mapping[str, Any]], params: Sequence[Any]) -> Iterator[dict[str, int]]:
        """Inside, vLLM has the requests: {its name of each: index}. Those that are not finished then are dropped."""
        llm = self.receiver.llm
        names = llm.enqueue(list(requests), list(params), use_tqdm=False)  # NUMBER or NUMBER-RANDOM
        try:
            yield {name.partition("-")[0]: index for index, name in enumerate(names)}
        finally:
            if llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.abort_request(names, internal=True)

    def _step(self, progress: Callable[[int], None] | None) -> list[Any]:
        """What finishes in vLLM's next step."""
        try:
            return [output for output in self.receiver.llm.llm_engine.step() if output.finished]
        except Exception as error:  # its own, of torch, of its kernels
            if progress is not None:
                progress(0)  # Ctrl-C ends vLLM's workers too: then the stop is what happened
            why = reason(error).rstrip(".")[:500]
            raise ValueError(
                f"vLLM fails while it samples: {why}. --resume goes on from the newest checkpoint"
            ) from error


def layers_line(decoder: Decoder, found: Sequence[Mapping[str, tuple[bool, str]]]) -> str:
    """What vLLM made of the linear layers, in a line.

    Args:
        decoder: says which are FP8.
        found: `WorkerExtension.octavo_layers` of each of vLLM's workers.

    Raises:
        ValueError: a layer is not in the format that the decoder has; or it is, and activations stay BF16.
    """
    declared = {
        f"model.layers.{index}.{name}": layer.quantized
        for index, block in enumerate(decoder.blocks())
        for name, layer in (
            ("self_attn.qkv_proj", block.qkv_proj),
            ("self_attn.o_proj", block.o_proj),
            ("mlp.gate_up_proj", block.gate_up_proj),
            ("mlp.down_proj", block.down_proj),
        )
    }
    kernels: dict[str, int] = {}
    for layers in found:
        for name, quantized in declared.items():
            is_fp8, kernel = layers.get(name, (None, "nothing"))
            if is_fp8 != quantized or "Marlin" in kernel:
                raise ValueError(
                    f"vLLM runs {name} by {kernel} {'in FP8' if is_fp8 else 'in BF16'}, and the rollout's recipe says "
                    f"{'E4M3 weights and activations' if quantized else 'BF16'}. Use a GPU with FP8 products (Hopper), "
                    f"or precision.rollout: bf16"
                )
            kernels[kernel] = kernels.get(kernel, 0) + 1
    texts = ", ".join(f"{count // len(found)} by {kernel}" for kernel, count in kernels.items())
    unlike = ""
    if decoder.recipe.scale_rounding == "power_of_two" and not any("DeepGemm" in kernel for kernel in kernels):
        unlike = "; activation scales are no powers of two there, only DeepGEMM rounds them"
    return f"{sum(declared.values())} of {len(declared)} linear layers in FP8, {texts}{unlike}"


def _completion(output: Any, key: tuple[int, int]) -> Completion:
    """Of a finished request; `key` is seed and sequence id, for the error."""
    (found,) = output.outputs
    tokens = list(found.token_ids)
    logprobs = [float(at[token].logprob) for at, token in zip(found.logprobs, tokens, strict=True)]
    positions = range(len(output.prompt_token_ids), len(output.prompt_token_ids) + len(tokens))
    check_finite(logprobs, [(*key, position) for position in positions])
    if found.finish_reason not in ("stop", "length"):
        raise ValueError(f"vLLM ended a completion for the reason {found.finish_reason!r}, which is no policy's end")
    return Completion(
        prompt=list(output.prompt_token_ids),
        tokens=tokens,
        rollout_logprobs=logprobs,
        finish_reason=found.finish_reason,
    )
