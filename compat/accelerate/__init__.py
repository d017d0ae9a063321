"""Hugging Face's accelerate: not a stack of its own, but a program that starts runs of FSDP, DeepSpeed and Megatron-LM.

`host` reads what starts such a run, `launcher` follows accelerate's launcher, and `plugins` what its plugins make of
the environment that the launcher sets.
"""
