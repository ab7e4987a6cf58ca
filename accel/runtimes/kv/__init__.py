"""Holds the KV cache of a decoder between the steps of a generation, and reads the files of its adapters. Takes an open
session and the inputs of a step. Gives the logits of the step.
"""
