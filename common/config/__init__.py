"""Flags: their bounds, their groups, and the parsing of the command line and YAML."""
