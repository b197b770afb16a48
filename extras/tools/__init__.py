"""Tools that a model may call: their schemas, the calls in a completion, and their execution."""
