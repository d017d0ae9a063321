"""Hugging Face's accelerate: a program that starts runs of FSDP, DeepSpeed and Megatron-LM.

`host` reads what starts such a run, `launcher` follows accelerate's launcher, `trainer` what Hugging Face's Trainer
passes on, and `plugins` what the plugins make of the environment that the launcher sets. The dialect reads and writes
runs of FSDP and DDP; those of DeepSpeed are DeepSpeed's.
"""
