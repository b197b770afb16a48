"""Reward functions, reward models, and the processes that compute rewards with a deadline."""
