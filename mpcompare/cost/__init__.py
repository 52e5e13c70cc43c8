"""What a step costs on paper: memory, arithmetic and traffic."""
