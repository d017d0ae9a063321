"""What imports Fast-LLM itself."""
