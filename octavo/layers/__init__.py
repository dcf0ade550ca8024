"""Layers: linear with its three GEMMs, rotary embedding, attention over packed sequences."""
