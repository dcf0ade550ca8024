"""A run's precision flow against another's, and the keys of the configuration that differ."""

from __future__ import annotations

from pathlib import Path

from octavo.numerics.precision_flow import PrecisionFlow, lines
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import differences, load_config, to_dict
from octavo.trainer.precision import declared_flow


def against_lines(config: TrainConfig, flow: PrecisionFlow, other: Path) -> list[str]:
    """What differs, a line each.

    Args:
        config, flow: of this run.
        other: another run's YAML, or the precision.json that one left, which has no configuration to compare.

    Raises:
        ValueError: the file cannot be used.
    """
    found = []
    if other.suffix == ".json":
        try:
            other_flow = PrecisionFlow.from_json(other.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"--against {other}: {error}") from error
    else:
        other_config = load_config(TrainConfig, other)
        other_flow = declared_flow(other_config)
        keys = differences(to_dict(config), to_dict(other_config))
        found.append(f"{len(keys)} keys differ from {other}, this / other:")
        found += [f"  {key}: {mine} / {its}" for key, mine, its in keys]
    edges = lines(flow.diff(other_flow), roles=True)
    found.append(f"{len(edges)} groups of modules differ from {other}, this / other:")
    return found + [f"  {line}" for line in edges]
