"""Code that needs torch: Merak's own interface, implemented by the native engine."""
