"""Whether verl has taken up what octavo registers."""

from importlib.metadata import entry_points, version

VERSION = "0.9.1"


def missing() -> str:
    """What is not in verl's registries, and why as far as can be seen; empty where nothing is missing."""
    import verl  # noqa: F401  runs the entry points
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.workers.engine.base import EngineRegistry

    from octavo.plugins.verl.engine import STRATEGY, Engine
    from octavo.plugins.verl.losses import LOSSES

    absent = [f"policy loss {name}" for name, loss in LOSSES.items() if POLICY_LOSS_REGISTRY.get(name) is not loss]
    engines = EngineRegistry._engines.get("language_model", {}).get(STRATEGY, {})
    absent += [f"engine {STRATEGY} on {device}" for device in ("cuda", "cpu") if engines.get(device) is not Engine]
    if not absent:
        return ""
    named = [entry.name for entry in entry_points(group="verl.plugins")]
    why = "" if "octavo" in named else "; no entry point 'octavo' in the group verl.plugins: install octavo with pip"
    if version("verl") != VERSION:
        why += f"; verl is {version('verl')}, and the plug-in is made for {VERSION}"
    return f"verl lacks {', '.join(absent)}{why}"
