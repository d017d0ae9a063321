"""Each stack's own engine or model, started on a config that was written for it."""
