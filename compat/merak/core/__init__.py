"""Where Merak's scripts find what they import from its core."""
