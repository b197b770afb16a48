"""Models: from a Hugging Face folder to an FSDP2 policy, reward or value model that runs packs."""
