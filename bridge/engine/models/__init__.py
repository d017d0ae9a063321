"""Models to train out of the box."""
