"""Clusters: each kind yields the address of a Dask scheduler."""
