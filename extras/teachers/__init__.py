"""Teachers of distill.py with stored log-probs or with another tokenizer."""
