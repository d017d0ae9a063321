"""Reads facts of a release from its code, records its results for generated configs, and lists open
decisions.
"""
