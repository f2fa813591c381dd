"""Clean-up of the state directory: what may be removed, and its removal."""
