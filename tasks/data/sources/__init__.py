"""One module per kind of source; `paceline.tasks.data.sources.registry` chooses between them."""
