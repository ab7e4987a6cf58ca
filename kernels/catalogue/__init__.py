"""The catalogue of kernels: problem descriptions (specs), shipped configurations, and the float64 reference.

Makes a `GemmSpec` or a `ConvSpec` from tensors, or from sizes and dtypes. Gives a spec its configurations, its exact
result and the bound of its error.
"""
