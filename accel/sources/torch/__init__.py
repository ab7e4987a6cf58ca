"""Opens PyTorch models. Each kind of source has its own module: factory, exported program or TorchScript, transformers
folder, ``accel train`` folder.

``source.open_torch`` takes a spec, inputs, weights and dims, and returns an artifact of kind ``torch``.
``source.module_of`` returns the artifact's module.
"""
