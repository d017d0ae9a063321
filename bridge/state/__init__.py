"""States of a run on disk: weights, moments, counters and random states, read and written without executing anything."""
