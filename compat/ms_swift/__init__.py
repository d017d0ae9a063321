"""ms-swift: a front end of Hugging Face's Trainer, with the commands `swift sft`, `swift pt` and `swift rlhf`."""
