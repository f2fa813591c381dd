"""One module per kind of source; `tasks.data.source` chooses between them."""
