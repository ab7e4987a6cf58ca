"""Planning a training run or a deployment before it is launched: memory, communication, time.

Takes the numbers that describe a model, a layout of ranks and a machine (`spec.py`). Returns a `Plan`, or all plans
that fit.
"""
