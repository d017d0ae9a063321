"""Modules that implement DeepSpeed's names: the `__all__` of each lists them. The table in
`compat.deepspeed.names` finds the module.
"""
