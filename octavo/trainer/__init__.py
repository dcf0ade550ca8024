"""The training run: its configuration, loop, optimiser, checkpoints and metrics."""
