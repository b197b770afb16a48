"""Rows of files and of the hub -> messages -> the text of prompts and turns -> token ids."""
