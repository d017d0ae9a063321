"""Verify: runs a config and its translation on every engine that can run them, and compares the
numbers.
"""
