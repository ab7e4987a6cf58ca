"""The config of a training run: dataclasses and choices, TOML, validity rules, the learning rate schedule.

In: a TOML file and `--key=value`. Out: a checked `TrainConfig`, or `BadConfig` with the fix in one sentence.
"""
