"""The passes of an entrant: each takes what earlier ones left in its state, and returns its part of ``result.json``."""
