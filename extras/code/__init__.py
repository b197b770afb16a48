"""Rewards for programs: which block is the program, tests, and the sandbox that runs both."""
