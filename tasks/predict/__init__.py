"""Prediction: a trained model over a source of images, in parallel on Dask workers, into Parquet."""
