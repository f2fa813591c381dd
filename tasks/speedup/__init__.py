"""Speedup of a run over its baseline, with its certainty and cause."""
