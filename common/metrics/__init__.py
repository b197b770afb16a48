"""Metrics: means over micro-batches and ranks, metrics.jsonl, curves, and reading other runs."""
