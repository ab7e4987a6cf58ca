"""Orders the training samples of each rank, and packs documents into sequences.

Takes a map-style dataset of `(inputs, targets)`. Returns this rank's micro-batches, starting at any step.
"""
