"""Modules that implement the names of DeepSpeed's modules. The table in `compat.deepspeed.names`
says which of these modules implements which module of DeepSpeed. The `__all__` of each module lists
its names.
"""
