"""Keeps what PyTorch would otherwise compute again in each export."""
