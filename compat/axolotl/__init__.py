"""axolotl: a front end of Hugging Face's Trainer, with a YAML file and `axolotl train`."""
