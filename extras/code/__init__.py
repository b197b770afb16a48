"""Rewards for programs: finding them in completions, their tests, and the sandbox for both."""
