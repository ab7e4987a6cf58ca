"""``python -m accel`` is the ``accel`` command."""

from accel.cli import main

main()
