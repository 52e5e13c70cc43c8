"""The comparison of finished runs: verdicts, a table, figures. Reads records only; knows no backend by name."""
