"""The order of events: flows and the command line. No arithmetic, no file formats."""
