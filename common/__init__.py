"""The code that the scripts share, one package per concern."""
