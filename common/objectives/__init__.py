"""Losses, divergences, advantages and importance weights, as pure functions of tensors, and the
flags that select them."""
