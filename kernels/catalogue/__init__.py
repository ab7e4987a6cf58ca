"""Describes the kernels: problem descriptions (specs), shipped configurations, and the float64 reference.

Makes a `GemmSpec` or a `ConvSpec` from tensors, or from sizes and dtypes. For each spec, the package gives the
configurations, the exact result and a bound on the error.
"""
