"""The sweep stage: several trials of one recipe at once; what to try next, and what was found."""
