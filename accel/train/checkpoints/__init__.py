"""Checkpoints of a run, and `final/`: the trained weights with the code and the inputs that describe the model.

In: the state of model and optimizer on every rank. Out: folders in the run folder, each written atomically.
"""
