"""Makes and tries the models of ``benchmarks/zoo.py``. The models are in ``families`` and ``own``."""
