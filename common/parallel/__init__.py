"""Process group, collectives and failures; FSDP mesh; placement of sequences on ranks."""
