"""Training: a coordinator starts one fresh process per rank through Dask and watches the group."""
