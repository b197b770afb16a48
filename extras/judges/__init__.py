"""Chat models that are asked about completions, or compare two of them (`judge:`, `rank:`)."""
