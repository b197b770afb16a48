"""Process group, collectives and failures; FSDP mesh; context groups."""
