"""Writes and reads the checkpoints of a run, and writes `final/`, the trained model with its code and example inputs.

Takes the state of the model and the optimizer on every rank. Writes each checkpoint atomically, as a folder in the run
folder.
"""
