"""Merak's package `core`, from which its scripts import."""
