"""The outputs of a report: what is printed, and the files that are written."""
