"""Examines a site: what is wrong with it before a run meets it, each with its remedy."""
