"""What a command found, as text, JSON, SARIF and tables, and its exit code."""
