"""verl looks at these when it is first imported."""

import os

os.environ.setdefault("VERL_PLATFORM", "octavo_cpu")
os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_on_cpu")
