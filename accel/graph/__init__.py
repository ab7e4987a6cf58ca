"""The graph of a model of any kind: its operations with their cost, and the page that draws them.

Takes an artifact and sizes for its dynamic dims. Returns nodes with shapes, FLOPs and parameters, as JSON or as an HTML
page.
"""
