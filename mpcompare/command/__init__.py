"""All that knows Hydra."""
