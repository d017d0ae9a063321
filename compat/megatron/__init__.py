"""Megatron-Core and Megatron-LM: arguments, recipes and config objects of every release from 0.9.0 to 0.19.2."""
