"""Trace: what happens inside a run, layer by layer, and whether ranks that should agree do."""
