"""The work of a run, one folder per stage."""
