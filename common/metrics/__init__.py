"""Metrics: means over micro-batches and ranks; JSONL, wandb, tensorboard, curves."""
