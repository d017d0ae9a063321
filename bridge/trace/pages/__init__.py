"""Pages: one run's log, or the comparison of two runs, as a single HTML file that loads nothing
else.
"""
