"""The graph of a model of any kind: its operations with their cost, and the page that draws them.

In: an artifact and sizes of its dynamic dims. Out: nodes with shapes, FLOPs and parameters, as JSON or an HTML page.
"""
