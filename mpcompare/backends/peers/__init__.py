"""Other people's mixed precision, and the usual ways to do it: each as its documentation says, nothing repaired."""
