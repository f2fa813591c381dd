"""How much faster a run is than its baseline, how certain that is, and why."""
