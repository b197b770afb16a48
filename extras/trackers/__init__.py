"""Metrics and samples of a run in wandb and tensorboard (`--log_to`)."""
