"""Hugging Face checkpoint -> FSDP2 policy, reward or value model; LoRA; chunked log-probs."""
