"""Example models: a digits CNN, a small GPT and all-MiniLM-L6-v2, with their data, metrics, and the demo.

Reads datasets and weights from installed packages, and downloads nothing. Has factory functions that make the models
and declare their inputs.
"""
