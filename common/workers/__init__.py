"""Processes that run a user's code with a time limit: rewards, environments, tools, agents."""
