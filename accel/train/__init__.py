"""Trains a model on one or many ranks, with precision modes, ZeRO, and tensor, pipeline and context parallelism.

In: a `TrainConfig` (`config/`). Out: a run folder with checkpoints, `log.jsonl`, and `final/`, which `accel export`
takes.
"""
