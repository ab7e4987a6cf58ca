"""Multiplies a few rows by int4 or int8 weights on the CPU, as the steps of a decoder do.

Takes float32 rows and weights in the packed form. Gives float32 rows. The C++ sources in ``csrc`` need no library.
"""
