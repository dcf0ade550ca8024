"""Advantages, losses, mismatch and calibration: pure functions on packed tensors."""
