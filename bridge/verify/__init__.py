"""Verify: the meaning of a config and of its translation, run side by side on every engine that can."""
