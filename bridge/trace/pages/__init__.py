"""Pages: the log of a run, or the comparison of two runs, as one self-contained HTML file."""
