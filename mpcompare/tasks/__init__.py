"""What is trained: a torch module, its loss, its optimizer and its data."""
