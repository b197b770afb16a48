"""The ranks of a run: process group, collectives, FSDP mesh, context groups, failures and stops."""
