"""What runs AutoModel's own code."""
