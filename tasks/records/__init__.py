"""The records that stages hand to each other: paths, counts, seconds and fingerprints.

Frozen and plain: they travel through Prefect, Dask and JSON files. Never arrays, models, clients or live clusters.
All times are seconds; unknown quantities are None, never guessed.
"""
