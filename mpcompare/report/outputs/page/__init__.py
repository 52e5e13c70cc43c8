"""The page ``index.html``: one file with everything in a report, which can be read without network and script."""
