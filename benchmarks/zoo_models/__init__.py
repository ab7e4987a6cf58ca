"""Makes and tries the models of ``benchmarks/zoo.py``. The packages ``families`` and ``own`` make the models."""
