"""Plans the memory, communication and time of a training run or a deployment before the launch.

Takes the numbers that describe a model, a layout of ranks and a machine (`spec.py`). Returns a `Plan`, or all plans
that fit into memory.
"""
