"""What each stack's own code says of a release: its keys, defaults, refusals."""
