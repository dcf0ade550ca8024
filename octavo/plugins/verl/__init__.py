"""octavo inside verl 0.9.1: policy losses, an FP8 training engine, and FP8 weights for verl's vLLM rollouts.

verl loads `registration` by the entry point group `verl.plugins`; docs/verl.md says what a verl user adds to a command.
"""

import verl  # noqa: F401  first of all: it loads the entry point, which imports the modules below

from octavo.plugins.verl.config import EngineConfig, PolicyLossConfig

__all__ = ["EngineConfig", "PolicyLossConfig"]
