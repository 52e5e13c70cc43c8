"""The backends: one file each, and one row of the comparison."""
