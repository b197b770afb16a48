"""Programs for runs, models and the project's own pages."""
