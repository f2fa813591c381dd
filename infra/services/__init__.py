"""The services of a cluster's owner, started natively: PostgreSQL, Prefect, MLflow, a Dask scheduler and workers."""
