"""Who takes turns when, and what the measured times say."""
