"""Adds a release: reads its facts from its code, records its results for generated configs, and lists open decisions."""
