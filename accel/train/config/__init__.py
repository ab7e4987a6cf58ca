"""The config of a training run: dataclasses and choices, TOML, validity rules, the learning rate schedule.

Takes a TOML file and `--key=value`. Returns a checked `TrainConfig`, or raises `BadConfig` with the fix in one
sentence.
"""
