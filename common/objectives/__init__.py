"""Equations as pure functions of tensors: losses, divergences, advantages, importance weights;
and their flags."""
