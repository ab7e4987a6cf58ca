"""Opens PyTorch models. The modules ``factory``, ``saved``, ``pretrained``, ``train_folder`` and ``live`` each open one
kind of source.

``source.open_torch`` takes a spec, inputs, weights and dims, and returns an artifact of kind ``torch``.
``source.module_of`` returns the artifact's module.
"""
