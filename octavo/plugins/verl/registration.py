"""What verl imports by the entry point group `verl.plugins`: losses and engine go into its registries.

verl says nothing of a plug-in that fails, so this does. `python -m octavo.plugins.verl` shows whether all is in place.
"""

import sys
import traceback

try:
    from octavo.plugins.verl.engine import register_engine
    from octavo.plugins.verl.losses import register_losses

    register_losses()
    register_engine()
except Exception:
    print("octavo: the plug-in for verl cannot be loaded, and verl goes on without it:", file=sys.stderr)
    traceback.print_exc()
    raise
