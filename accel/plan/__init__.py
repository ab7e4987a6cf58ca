"""Planning a training run or a deployment before it is launched: memory, communication, time.

In: the numbers that describe a model, a layout of ranks and a machine (`spec.py`). Out: a `Plan`, or all plans that
fit.
"""
