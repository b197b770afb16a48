"""Samples as token ids -> the ranks that train on them -> packed micro-batches."""
