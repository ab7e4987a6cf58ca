"""PyTorch models: a file per form (factory, exported program and TorchScript, transformers folder, folder of accel
train).

In: a spec, with inputs, weights and dims. Out: an artifact of kind ``torch``, and its module (``source.module_of``).
"""
