"""Reward functions, reward models, and their weighted sum."""
