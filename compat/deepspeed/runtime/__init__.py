"""What runs: DeepSpeed itself behind the engines' interface, and everything else of this stack that needs torch."""
