"""Tests by promise, and what they share: modules without `test_` are imported from here, and run by `python -m`."""
