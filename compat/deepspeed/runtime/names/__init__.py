"""What stands behind DeepSpeed's names: modules whose `__all__` are the names; `compat.deepspeed.names` says where."""
