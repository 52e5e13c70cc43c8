"""One file a backend, one column of the comparison each."""
