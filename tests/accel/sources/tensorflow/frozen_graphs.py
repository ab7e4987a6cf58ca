"""Runs as a separate process, and writes small frozen graphs with training nodes into the given folder.

Each function in ``GRAPHS`` builds a graph from the input ``x``. The function returns the graph's output, and the values
that the placeholders must have at inference. If a dropout stays random at inference, the function also returns the
output without this dropout. ``NAME.npz`` holds TensorFlow's outputs at inference.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
MEAN, VARIANCE = [0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 4.0]
GRAPHS: dict[str, Callable[[Any], Any]] = {}


def graph(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    GRAPHS[build.__name__] = build
    return build


def dense(x: Any, name: str, columns: int = 4) -> Any:
    rng = np.random.default_rng(sum(map(ord, name)))
    return tf.matmul(x, tf.constant(rng.standard_normal((x.shape[-1], columns)).astype(np.float32), name=name))


def old_dropout(x: Any, keep: Any) -> Any:
    """Returns dropout in the form that TensorFlow 1.4 wrote."""
    noise = tf.floor(keep + tf.random.uniform(tf.shape(x), dtype=x.dtype))
    return tf.realdiv(x, keep) * noise


def named(shape: Any = (), kind: Any = tf.float32, name: str = "keep_prob") -> Any:
    return v1.placeholder(kind, shape, name=name)


@graph
def keep_prob(x: Any) -> Any:
    keep = named()
    return dense(v1.nn.dropout(dense(x, "w"), keep_prob=keep), "v"), {keep: 1.0}


@graph
def keep_prob_without_shape(x: Any) -> Any:
    keep = named(None)
    return dense(v1.nn.dropout(dense(x, "w"), keep_prob=keep), "v"), {keep: 1.0}


@graph
def keep_prob_of_tf14(x: Any) -> Any:
    keep = named()
    return dense(old_dropout(dense(x, "w"), keep), "v"), {keep: 1.0}


@graph
def keep_prob_thrice(x: Any) -> Any:
    keep = named()
    for name in ("w", "vv", "uuu"):
        x = old_dropout(tf.nn.relu(dense(x, name)), keep)
    return x, {keep: 1.0}


@graph
def two_keep_probs(x: Any) -> Any:
    one, two = named(name="one/keep"), named(name="two/keep")
    return v1.nn.dropout(old_dropout(dense(x, "w"), one), keep_prob=two), {one: 1.0, two: 1.0}


@graph
def rate(x: Any) -> Any:
    drop = named(name="rate")
    return dense(tf.nn.dropout(dense(x, "w"), rate=drop), "v"), {drop: 0.0}


@graph
def rate_of_residual(x: Any) -> Any:
    drop = named(name="rate")
    return x + tf.nn.dropout(dense(x, "w"), rate=drop), {drop: 0.0}


@graph
def keep_prob_of_rows(x: Any) -> Any:
    keep = named()
    return v1.nn.dropout(dense(x, "w"), keep_prob=keep, noise_shape=[tf.shape(x)[0], 1]), {keep: 1.0}


@graph
def keep_prob_in_half(x: Any) -> Any:
    keep = named(kind=tf.float16)
    half = tf.cast(dense(x, "w"), tf.float16)
    return tf.cast(old_dropout(half, keep), tf.float32), {keep: 1.0}


@graph
def keep_prob_in_double(x: Any) -> Any:
    keep = named(kind=tf.float64)
    return tf.cast(v1.nn.dropout(tf.cast(dense(x, "w"), tf.float64), keep_prob=keep), tf.float32), {keep: 1.0}


@graph
def keep_prob_default(x: Any) -> Any:
    keep = v1.placeholder_with_default(0.5, (), name="keep_prob")
    return v1.nn.dropout(dense(x, "w"), keep_prob=keep), {keep: 1.0}


@graph
def keep_prob_default_of_inference(x: Any) -> Any:
    keep = v1.placeholder_with_default(1.0, (), name="keep_prob")
    return old_dropout(dense(x, "w"), keep), {keep: 1.0}


def conditional(predicate: Any, yes: Callable[[], Any], no: Callable[[], Any], *, old: bool) -> Any:
    """Makes a tf.cond of the ops Switch and Merge if ``old`` is true, and of the op If otherwise."""
    (v1.disable_control_flow_v2 if old else v1.enable_control_flow_v2)()
    try:
        return v1.cond(predicate, yes, no)
    finally:
        v1.enable_control_flow_v2()


def _dropout_in_cond(x: Any, old: bool, predicate: Any, value: Any) -> Any:
    x = dense(x, "w")
    return dense(conditional(predicate, lambda: tf.nn.dropout(x, 0.5), lambda: x, old=old), "v"), {predicate: value}


@graph
def dropout_in_switch(x: Any) -> Any:
    return _dropout_in_cond(x, True, named(kind=tf.bool, name="is_training"), False)


@graph
def dropout_in_if(x: Any) -> Any:
    return _dropout_in_cond(x, False, named(kind=tf.bool, name="is_training"), False)


@graph
def dropout_in_switch_with_keep(x: Any) -> Any:
    on, keep, x = named(kind=tf.bool, name="is_training"), named(), dense(x, "w")
    return conditional(on, lambda: old_dropout(x, keep), lambda: x, old=True), {on: False, keep: 1.0}


@graph
def dropout_in_if_with_keep(x: Any) -> Any:
    on, keep, x = named(kind=tf.bool, name="is_training"), named(), dense(x, "w")
    return conditional(on, lambda: old_dropout(x, keep), lambda: x, old=False), {on: False, keep: 1.0}


@graph
def testing_in_switch(x: Any) -> Any:
    on, x = named(kind=tf.bool, name="testing"), dense(x, "w")
    return conditional(on, lambda: x * 1.0, lambda: tf.nn.dropout(x, 0.5), old=True), {on: True}


@graph
def not_training(x: Any) -> Any:
    on, x = named(kind=tf.bool, name="is_training"), dense(x, "w")
    off = tf.logical_not(on)
    return conditional(off, lambda: x * 1.0, lambda: tf.nn.dropout(x, 0.5), old=False), {on: False}


@graph
def learning_phase(x: Any) -> Any:
    phase, x = v1.placeholder_with_default(False, (), name="keras_learning_phase"), dense(x, "w")
    return conditional(phase, lambda: tf.nn.dropout(x, 0.5), lambda: x, old=True), {phase: False}


@graph
def learning_phase_number(x: Any) -> Any:
    phase, x = named(kind=tf.int32, name="keras_learning_phase"), dense(x, "w")
    on = tf.equal(phase, 1)
    return conditional(on, lambda: tf.nn.dropout(x, 0.5), lambda: x, old=True), {phase: 0}


@graph
def training_by_default(x: Any) -> Any:
    phase, x = v1.placeholder_with_default(True, (), name="training"), dense(x, "w")
    return conditional(phase, lambda: tf.nn.dropout(x, 0.5), lambda: x, old=False), {phase: False}


def _norm(x: Any, training: bool) -> Any:
    if not training:
        return tf.nn.batch_normalization(x, tf.constant(MEAN), tf.constant(VARIANCE), None, None, 1e-3)
    mean, variance = tf.nn.moments(x, list(range(len(x.shape) - 1)))
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def _fused(x: Any, training: bool) -> Any:
    mean, variance = (None, None) if training else (tf.constant(MEAN), tf.constant(VARIANCE))
    gamma, beta = tf.constant(VARIANCE), tf.constant(MEAN)
    return v1.nn.fused_batch_norm(x, gamma, beta, mean, variance, is_training=training)[0]


def _normed(x: Any, norm: Any, old: bool, name: str = "is_training") -> Any:
    on, x = named(kind=tf.bool, name=name), dense(x, "w")
    if norm is _fused:
        x = tf.reshape(x, [-1, 1, 1, 4])
    y = conditional(on, lambda: norm(x, True), lambda: norm(x, False), old=old)
    return tf.reshape(y, [-1, 4]), {on: False}


@graph
def norm_in_switch(x: Any) -> Any:
    return _normed(x, _norm, True)


@graph
def norm_in_if(x: Any) -> Any:
    return _normed(x, _norm, False, "phase_train")


@graph
def fused_in_switch(x: Any) -> Any:
    return _normed(x, _fused, True, "phase_train")


@graph
def fused_in_if(x: Any) -> Any:
    return _normed(x, _fused, False)


@graph
def moments_by_cond(x: Any) -> Any:
    on, x = named(kind=tf.bool, name="phase_train"), dense(x, "w")
    batch = tf.nn.moments(x, [0])
    known = [tf.constant(MEAN), tf.constant(VARIANCE)]
    mean, variance = conditional(on, lambda: [tf.identity(t) for t in batch], lambda: known, old=True)
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3), {on: False}


@graph
def norm_and_dropout(x: Any) -> Any:
    on, keep, x = named(kind=tf.bool, name="is_training"), named(), dense(x, "w")
    x = conditional(on, lambda: _norm(x, True), lambda: _norm(x, False), old=True)
    return dense(v1.nn.dropout(tf.nn.relu(x), keep_prob=keep), "v"), {on: False, keep: 1.0}


@graph
def norm_by_where(x: Any) -> Any:
    on, x = named(kind=tf.bool, name="is_training"), dense(x, "w")
    return tf.where(on, _norm(x, True), _norm(x, False)), {on: False}


@graph
def stddev(x: Any) -> Any:
    size = named(name="stddev")
    x = dense(x, "w")
    return x + tf.random.normal(tf.shape(x), stddev=size), {size: 0.0}


@graph
def noise_in_if(x: Any) -> Any:
    on, x = named(kind=tf.bool, name="add_noise"), dense(x, "w")
    return conditional(on, lambda: x + tf.random.normal(tf.shape(x)), lambda: x, old=False), {on: False}


@graph
def noise_by_chance(x: Any) -> Any:
    chance, x = named(name="chance"), dense(x, "w")
    on = tf.random.uniform([]) < chance
    return conditional(on, lambda: x + tf.random.normal(tf.shape(x)), lambda: x, old=True), {chance: 0.0}


@graph
def zoneout(x: Any) -> Any:
    chance, x = named(name="chance"), dense(x, "w")
    on = tf.random.uniform(tf.shape(x)) < chance
    return tf.where(on, tf.random.normal(tf.shape(x)), x), {chance: 0.0}


@graph
def noise_by_switch(x: Any) -> Any:
    on, x = named(kind=tf.bool, name="training"), dense(x, "w")
    return x + tf.cast(on, tf.float32) * tf.random.normal(tf.shape(x)), {on: False}


@graph
def function(x: Any) -> Any:
    keep = named()

    @tf.function
    def inner(x: Any, keep: Any) -> Any:
        return old_dropout(x, keep)

    return tf.identity(inner(dense(x, "w"), keep)), {keep: 1.0}


@graph
def function_in_function(x: Any) -> Any:
    on = named(kind=tf.bool, name="is_training")

    @tf.function
    def inner(x: Any, on: Any) -> Any:
        return tf.cond(on, lambda: tf.nn.dropout(x, 0.5), lambda: x)

    @tf.function
    def outer(x: Any, on: Any) -> Any:
        return inner(x * 2, on) + 1

    return tf.identity(outer(dense(x, "w"), on)), {on: False}


@graph
def case_of_modes(x: Any) -> Any:
    mode, x = named(kind=tf.int32, name="mode"), dense(x, "w")
    return tf.switch_case(mode, [lambda: x * 1.0, lambda: tf.nn.dropout(x, 0.5)]), {mode: 0}


# In these graphs, only the user knows the right value of a placeholder.
@graph
def scale(x: Any) -> Any:
    size = named(name="scale")
    return dense(x, "w") * size, {size: 0.5}


@graph
def scale_and_dropout(x: Any) -> Any:
    size, keep = named(name="scale"), named()
    return v1.nn.dropout(dense(x, "w") * size, keep_prob=keep), {size: 0.5, keep: 1.0}


@graph
def branches(x: Any) -> Any:
    on, x = named(kind=tf.bool, name="double"), dense(x, "w")
    return conditional(on, lambda: x * 2.0, lambda: x, old=False), {on: True}


@graph
def labels(x: Any) -> Any:
    known = named([None, 4], name="labels")
    return dense(x, "w") - known, {}


@graph
def constant_dropout_too(x: Any) -> Any:
    """Returns a net with two dropouts. The second dropout has a constant rate, so the placeholder can't turn it off."""
    keep = named()
    y = old_dropout(dense(x, "w"), keep)
    return tf.nn.dropout(y, 0.3), {keep: 1.0}, y


def write(name: str) -> dict[str, Any]:
    """Writes the graph ``name``, and returns the values of its placeholders at inference."""
    with tf.Graph().as_default() as whole, v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        y, values, *stripped = GRAPHS[name](x)
        y = tf.identity(y, name="y")
        Path(f"{name}.pb").write_bytes(whole.as_graph_def().SerializeToString())
        feeds = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
        if values:
            wanted = stripped[0] if stripped else y
            np.savez(f"{name}.npz", x=feeds, y=session.run(wanted, {x: feeds, **values}))
        return {tensor.op.name: value for tensor, value in values.items()}


class Norm(tf.Module):
    """Computes a batch normalization. The training branch assigns to a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.variance = tf.Variable(MEAN), tf.Variable(VARIANCE)

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")])
    def run(self, x: Any) -> Any:
        return {"y": tf.cond(tf.reduce_sum(x) > 1e9, lambda: self.train(x), lambda: self.infer(x))}

    def infer(self, x: Any) -> Any:
        return tf.nn.batch_normalization(x, self.mean, self.variance, None, None, 1e-3)

    def train(self, x: Any) -> Any:
        mean, variance = tf.nn.moments(x, [0])
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def saved_models() -> None:
    """Writes the SavedModels ``omits`` and ``assigns``. The signature of ``omits``, a TF1 SavedModel, leaves out a keep
    probability."""
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        weight = v1.get_variable("w", [4, 3], initializer=v1.ones_initializer())
        y = v1.nn.dropout(tf.matmul(x, weight), keep_prob=named())
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, "omits", {"x": x}, {"y": y})
    norm = Norm()
    tf.saved_model.save(norm, "assigns", signatures=norm.run)


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    saved_models()
    made = {name: write(name) for name in GRAPHS}
    Path("values.json").write_text(json.dumps(made))
