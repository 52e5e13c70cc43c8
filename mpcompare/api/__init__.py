"""The comparison as a function, for scripts, tests and notebooks: ``mpcompare.compare``."""
