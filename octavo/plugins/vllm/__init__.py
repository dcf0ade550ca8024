"""octavo's FP8 weights in a running vLLM, as they were quantised; docs/vllm.md."""

from octavo.plugins.vllm.weights import Receiver, publish

__all__ = ["Receiver", "publish"]
