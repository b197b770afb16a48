"""Metrics: means over micro-batches and ranks; JSONL, curves, trackers."""
