"""Rewards for multiple choice, short answers, instructions (IFEval) and countdown."""
