"""One module per kind of source; `tasks.data.sources.registry` chooses between them."""
