"""The native operators, and what steps built on them share."""
