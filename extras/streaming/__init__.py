"""Training rows that are read when they are drawn (`--streaming`)."""
