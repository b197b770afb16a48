"""Optimizer step, checkpoints, and the run around the steps of a script."""
