"""octavo: FP8 reinforcement-learning post-training, one precision flow for rollout and training."""

__version__ = "0.1.0"
