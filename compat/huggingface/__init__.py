"""The Hugging Face dialect: the `config.json` of a model, for transformers 4.57 to 5.23. Such a
file describes the model, not its training.
"""
