"""Merak's package `utils`, from which its scripts import."""
