"""`--dry_run`: checks of a launch, and its memory and time; on CUDA, whether activations fit."""
