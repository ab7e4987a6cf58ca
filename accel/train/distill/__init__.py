"""Distillation: a student learns from the outputs, hidden states and attention of a teacher.

A teacher of PyTorch runs beside the student (``teacher``). A teacher in another format runs over all samples before
training (``ahead``). ``losses`` compares the two.
"""
