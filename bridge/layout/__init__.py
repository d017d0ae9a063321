"""Layouts as pure values: ranks and groups of ranks, stages of layers, shards of flat buffers, and
the collectives and messages of a step.
"""
