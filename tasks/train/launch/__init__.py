"""Starts the ranks of a training on a Dask cluster, watches them and restarts them."""
