"""Opens PyTorch models, with one module per kind of source (factory, exported program or TorchScript, transformers
folder, accel train).

Takes a spec, with inputs, weights and dims. Returns an artifact of kind ``torch``. ``source.module_of`` returns the
artifact's module.
"""
