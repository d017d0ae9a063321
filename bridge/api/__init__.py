"""What the commands do, as functions of Python: they take sources and options, return values and print nothing."""
