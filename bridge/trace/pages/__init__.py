"""Pages: what a run logged, or where two runs part, as one HTML file that needs nothing else."""
