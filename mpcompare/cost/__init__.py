"""The cost of a step on paper: memory and arithmetic."""
