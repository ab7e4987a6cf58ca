"""Trains a model on one or many ranks, with precision modes, ZeRO, and tensor, pipeline and context parallelism.

Takes a `TrainConfig` (`config/`). Writes a run folder with checkpoints, `log.jsonl`, and `final/`, which `accel export`
takes.
"""
