"""The cost of a step on paper: memory, arithmetic and traffic."""
