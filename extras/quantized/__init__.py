"""Frozen weights under adapters in 4.25 bits each (`--quantize`)."""
