"""pass@k, majority vote, intervals; evaluation of every checkpoint of a run."""
