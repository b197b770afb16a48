"""Confined execution of untrusted Python programs: Landlock, seccomp, resource limits, the judge of
their tests."""
