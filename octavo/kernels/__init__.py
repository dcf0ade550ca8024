"""Kernels: each file holds a reference that says what is right, its backward, and later the fast path."""
