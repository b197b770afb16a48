"""The optimizer step, checkpoints, and everything else that a script does around its steps."""
