"""Code that needs torch: runs of AutoModel's recipes, and AutoModel's own names over the native
engine.
"""
