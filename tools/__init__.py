"""Tools for runs, models and the project."""
