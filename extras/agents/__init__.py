"""Agents of the user that play an episode through an endpoint for chat completions (`--agent`)."""
