"""The dtypes in which each layer runs, seen in one step of a backend, outside of the timed region."""
