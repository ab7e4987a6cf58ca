"""The number formats of a run: the precision modes (``modes``), and matrix products in 8-bit floats (``fp8``)."""
