"""Gives a folder that a command writes into one owner at a time."""
