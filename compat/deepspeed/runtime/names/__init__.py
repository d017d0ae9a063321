"""Modules that implement DeepSpeed's names. The `__all__` of each module lists its names. The table
in `compat.deepspeed.names` assigns these modules to DeepSpeed's modules.
"""
