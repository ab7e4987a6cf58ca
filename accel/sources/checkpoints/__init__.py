"""Reads the weights of training checkpoints. Each format has its own module: DeepSpeed, torch.distributed.checkpoint,
Megatron, plain files.

Takes a file or a folder. Returns a ``Checkpoint``, whose tensors are read one at a time. No pickled code is executed.
"""
