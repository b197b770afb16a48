"""Reward functions and reward models, and the weighted sum of them that a run trains on."""
