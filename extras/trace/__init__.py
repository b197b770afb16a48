"""Traces of single steps, and what reads them: viewer, doctor, replay."""
