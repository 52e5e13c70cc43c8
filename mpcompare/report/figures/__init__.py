"""The comparison as figures."""
