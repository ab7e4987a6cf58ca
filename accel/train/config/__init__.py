"""The config of a training run: its dataclasses and choices, TOML, the rules it has to keep, the learning rate.

In: a TOML file and `--key=value`. Out: a checked `TrainConfig`, or `BadConfig` with the fix in one sentence.
"""
