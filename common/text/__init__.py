"""Data: rows of files and of the hub -> messages -> text of prompts and turns -> token ids."""
