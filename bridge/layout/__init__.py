"""Layouts as pure values: ranks and groups, layers to stages, shards of flat buffers, and the traffic that
follows.
"""
