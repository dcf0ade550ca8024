"""octavo diagnose: what FP8 does to a model, or did to another framework's run."""
