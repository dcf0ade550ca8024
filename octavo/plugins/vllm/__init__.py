"""octavo's FP8 weights in a running vLLM, as they were quantised, and vLLM as the trainer's engine; docs/vllm.md."""

from octavo.plugins.vllm.engine import VLLMEngine
from octavo.plugins.vllm.weights import Receiver, publish

__all__ = ["Receiver", "VLLMEngine", "publish"]
