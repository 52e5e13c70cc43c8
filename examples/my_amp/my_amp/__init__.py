"""A training step in mixed precision."""
