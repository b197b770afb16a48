"""What only some model types need: gated delta nets in packs, new weights of gpt-oss for vLLM."""
