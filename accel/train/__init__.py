"""Trains a model on one or many ranks, with precision modes, ZeRO, tensor, pipeline and context parallel.

In: a `TrainConfig` (`config/`). Out: a run folder with checkpoints, `log.jsonl`, and `final/`, which `accel export`
takes.
"""
