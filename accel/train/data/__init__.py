"""Training data: the order of samples on each rank, and the packing of documents into sequences.

Takes a map-style dataset of `(inputs, targets)`. Returns this rank's micro-batches, from any step on.
"""
