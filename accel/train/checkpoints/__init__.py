"""Checkpoints of a run, and `final/`: the trained weights with the code and the inputs that describe the model.

Takes the state of model and optimizer on every rank. Writes each checkpoint atomically, as a folder in the run folder.
"""
