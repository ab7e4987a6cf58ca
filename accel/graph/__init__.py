"""Reads the graph of a model of any kind, counts the cost of its operations, and draws the graph on a page.

Takes an artifact and sizes for its dynamic dims. Returns nodes with shapes, FLOPs and parameters, as JSON or as an HTML
page.
"""
