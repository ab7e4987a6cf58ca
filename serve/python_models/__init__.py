"""Models that are Python code: Triton's ``model.py`` with a class ``TritonPythonModel``.

In: requests and the model's folder. Out: responses. The code runs in a process of its own for each instance, which gets
and gives tensors through shared memory. A crash costs that process and its requests alone.
"""
