"""int8 by NNCF, as OpenVINO runs it fastest. Runs in a child process: see ``quantize``."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

import nncf
import numpy as np
import onnx

from accel.converters.quantize import Task, calibration_batches, calibration_feeds


def run_nncf(task: Task) -> dict[str, Any]:
    """QDQ where NNCF's rules for OpenVINO put it: uint8 or int8 activations, int8 weights per channel."""
    nncf.set_log_level(logging.ERROR)
    config = task.config
    model = onnx.load(str(task.path))
    feeds = _Feeds(task)
    ignored = [re.escape(name) for name in task.excluded]
    if config.ops:
        ignored += [re.escape(node.name) for node in model.graph.node if node.op_type not in config.ops]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside NNCF and torch
        made = nncf.quantize(
            model,
            nncf.Dataset(feeds),
            subset_size=calibration_batches(task, 1),
            model_type=nncf.ModelType.TRANSFORMER if task.transformer else None,
            ignored_scope=nncf.IgnoredScope(patterns=ignored, validate=False) if ignored else None,
            advanced_parameters=_advanced(task),
        )
    onnx.save(made, str(task.out))
    return {}


class _Feeds:
    """The samples, one at a time, read anew each time NNCF goes over them."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return calibration_feeds(self._task, 1)


def _advanced(task: Task) -> Any:
    """The choice of range estimator and of per-channel weights, in NNCF's words."""
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, QuantizationParameters
    from nncf.quantization.range_estimator import (
        AggregatorType,
        RangeEstimatorParameters,
        StatisticsCollectorParameters,
        StatisticsType,
    )

    config = task.config
    parameters = AdvancedQuantizationParameters(
        weights_quantization_params=QuantizationParameters(per_channel=config.per_channel)
    )
    if config.calibration == "percentile":
        outside = 1 - config.percentile / 100
        low, high = (
            StatisticsCollectorParameters(
                statistics_type=StatisticsType.QUANTILE,
                aggregator_type=AggregatorType.MEAN,
                quantile_outlier_prob=outside,
            )
            for _ in range(2)
        )
        parameters.activations_range_estimator_params = RangeEstimatorParameters(low, high)
    return parameters
