"""Flags of the scripts: their types, their groups, and how the command line and YAML are read."""
