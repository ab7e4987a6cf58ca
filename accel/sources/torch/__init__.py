"""PyTorch models, a file per kind of source (factory, exported program and TorchScript, transformers folder, accel
train).

In: a spec, with inputs, weights and dims. Out: an artifact of kind ``torch``, and its module (``source.module_of``).
"""
