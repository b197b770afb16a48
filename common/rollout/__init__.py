"""Sampling of completions: prompts, engines (vLLM, transformers), episodes with environments, and
samplers on the training ranks or on dedicated ranks."""
