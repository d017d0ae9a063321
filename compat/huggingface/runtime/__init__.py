"""Modules that run transformers' own code."""
