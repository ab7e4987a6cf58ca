"""Reads the weights of training checkpoints. Has one module for each of the formats DeepSpeed,
torch.distributed.checkpoint, Megatron and plain files.

Takes a file or a folder. Returns a ``Checkpoint``, whose tensors are read one at a time. No pickled code is executed.
"""
