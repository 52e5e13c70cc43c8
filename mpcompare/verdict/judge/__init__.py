"""Does a run compute the same as its reference? From records only."""
