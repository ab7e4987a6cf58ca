"""The catalogue of kernels: problem descriptions (specs), shipped configurations, the float64 reference.

In: tensors, or sizes and dtypes. Out: a `GemmSpec` or `ConvSpec`, its configurations, its exact result and error bound.
"""
