"""Each stack's own code, asked what it makes of a config."""
