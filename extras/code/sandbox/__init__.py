"""Running untrusted Python programs: Landlock, seccomp and resource limits confine them, and a
judge runs tests of their functions."""
