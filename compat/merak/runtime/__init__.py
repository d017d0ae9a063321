"""Merak's own interface with the native engine behind it, and everything else of this stack that needs torch."""
