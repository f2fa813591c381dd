"""Where workers come from: each kind of cluster yields a scheduler address, and nothing else is needed of it."""
