"""Evaluation: during training, by eval.py, and of every checkpoint of a run."""
