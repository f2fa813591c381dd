"""The data stage: source -> transform -> graph (Dask) -> store, and the loaders that read the store."""
