"""The command line. Nothing outside of this room knows Hydra."""
