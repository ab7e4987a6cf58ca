"""Runs the ``accel`` command for ``python -m accel``."""

from accel.cli import main

main()
