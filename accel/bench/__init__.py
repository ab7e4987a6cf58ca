"""Timing candidates beside one another: what is said to be faster has to be faster than the noise."""
