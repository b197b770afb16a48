"""Metrics and samples of a run in wandb, tensorboard or a class of yours (`--log_to`)."""
