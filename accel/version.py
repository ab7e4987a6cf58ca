"""The version of accel."""

__version__ = "0.1.0"
