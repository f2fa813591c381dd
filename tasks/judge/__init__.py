"""Judges whether a new version of any program is faster and as good, by fresh processes of both."""
