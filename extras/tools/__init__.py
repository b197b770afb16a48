"""Functions that the model calls: their schemas, the calls in a completion, and their results."""
