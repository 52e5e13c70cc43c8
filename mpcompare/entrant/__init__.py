"""One entrant from first to last."""
