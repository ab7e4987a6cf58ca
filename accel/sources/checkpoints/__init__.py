"""Weights of training checkpoints: a file per format (DeepSpeed, torch.distributed.checkpoint, Megatron, plain files).

In: a file or a folder. Out: a ``Checkpoint``, whose tensors are read one at a time. No pickled code is executed.
"""
