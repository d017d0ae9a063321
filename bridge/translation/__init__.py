"""From one stack to another: to the plan and back, with every loss named; edits, differences and other
releases of a config.
"""
