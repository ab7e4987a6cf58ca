"""Training data: the order of samples on each rank, and the packing of documents into sequences.

In: a map-style dataset of `(inputs, targets)`. Out: this rank's micro-batches from any step on.
"""
