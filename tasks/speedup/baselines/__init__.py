"""The baselines of a run, and its ratios over them."""
