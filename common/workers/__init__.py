"""Processes that run a user's code with a deadline: rewards, environments, tools, agents."""
