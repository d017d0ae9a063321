"""Runs Megatron-Core itself as an engine, and holds all other code of this stack that needs torch."""
