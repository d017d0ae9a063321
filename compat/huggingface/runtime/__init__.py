"""What runs transformers' own code."""
