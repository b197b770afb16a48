"""Process group, collectives and failures; FSDP mesh; which rank computes which sequence."""
