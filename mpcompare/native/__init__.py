"""The native operators, and the parts that steps built on them share."""
