"""Translates operators of PyTorch to ONNX that torch's exporter leaves out or translates wrongly. ``table.py`` has all
translations, and each of the other files has the translations of one kind of operator."""
