"""Merak's package `core.tensor_parallel`, from which its scripts import."""
