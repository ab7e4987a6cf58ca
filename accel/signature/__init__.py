"""Describes a model's inputs and outputs: their names, dtypes and shapes, and the ranges of their dims and integers.
Also parses the command line's notation for inputs, makes random inputs, and checks inputs.
"""

from .bounds import Bound, free_dims, is_sum, size_at
from .dim_range import BATCH, DimRange, merged_ranges
from .integers import IntegerRanges, OutOfRange
from .other_sizes import other_sizes
from .signature import Feeds, Signature, shapes_of
from .spec import DTYPES, Dim, TensorSpec, as_tuples, new_names, numpy_dtype, with_values_of

__all__ = [
    "BATCH",
    "DTYPES",
    "Bound",
    "Dim",
    "DimRange",
    "Feeds",
    "IntegerRanges",
    "OutOfRange",
    "Signature",
    "TensorSpec",
    "as_tuples",
    "free_dims",
    "is_sum",
    "merged_ranges",
    "new_names",
    "numpy_dtype",
    "other_sizes",
    "shapes_of",
    "size_at",
    "with_values_of",
]
