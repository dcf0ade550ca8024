"""Rollout: the in-process engine. Paged KV cache, continuous batching, seeded sampling."""
