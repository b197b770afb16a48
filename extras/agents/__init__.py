"""Agents of the user that play an episode through an endpoint of the policy (`--agent`)."""
