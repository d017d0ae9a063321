"""Checkpoints on disk: weights, moments, counters and random states of a run, which are read and
written without executing anything.
"""
