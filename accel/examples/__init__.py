"""Example models: a digits CNN, a small GPT and all-MiniLM-L6-v2, with their data, metrics, and the demo.

In: datasets and weights from installed packages, without downloads. Out: factories that declare their inputs.
"""
