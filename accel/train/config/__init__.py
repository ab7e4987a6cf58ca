"""Defines the config of a training run: dataclasses, TOML files, validity rules and the learning rate schedule.

Takes a TOML file and overrides such as `--key=value`. Returns a checked `TrainConfig`, or raises `BadConfig` with the
fix in one sentence.
"""
