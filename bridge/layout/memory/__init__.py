"""Memory of a run as pure values: states, activations in flight and buffers of each rank, every
number with its formula.
"""
