"""Facts of a release from the release itself: what it has, what it makes of generated configs, and what a person decides."""
