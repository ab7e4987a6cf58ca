"""Runs a model on every row of a dataset, without a server.

Takes a model and Parquet files, with a column for each input. Writes Parquet files with a column for each output into a
folder, and the rows on which the model fails into another folder.
"""
