"""Runs a PyTorch module to learn which sizes it takes, which integers, and where it draws random numbers."""
