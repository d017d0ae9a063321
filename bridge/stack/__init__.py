"""What every stack has: its dialect, rules, checks and releases; and the registry that finds them."""
