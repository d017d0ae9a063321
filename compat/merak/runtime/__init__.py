"""Modules that need torch: Merak's own interface, implemented by the native engine."""
