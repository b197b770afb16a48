"""Engines (vLLM, transformers), episodes with environments, samplers on training ranks or dedicated
ranks."""
