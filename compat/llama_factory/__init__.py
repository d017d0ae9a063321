"""LLaMA-Factory: a front end of Hugging Face's Trainer, with a YAML or JSON file and `llamafactory-cli train`."""
