"""Traces of single training steps, and the programs that read them: viewer, doctor, replay."""
