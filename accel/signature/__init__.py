"""What a model takes and gives: ``Signature``, its tensors (``spec.py``), the ranges of their dims (``dim_range.py``)
and of their integers (``bounds.py``, ``integers.py``). Reads the notation of the command line, and
draws and checks inputs.
"""

from .bounds import Bound
from .dim_range import BATCH, DimRange, merged_ranges
from .integers import IntegerRanges, OutOfRange
from .signature import Feeds, Signature, shapes_of
from .spec import DTYPES, Dim, TensorSpec, new_names, numpy_dtype, with_values_of

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
    "merged_ranges",
    "new_names",
    "numpy_dtype",
    "shapes_of",
    "with_values_of",
]
