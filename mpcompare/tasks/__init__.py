"""The tasks: a torch module, its loss, its optimizer, its schedule and its data."""
