"""Builds textgenrnn's net in code, because the package contains only the weights."""

import importlib.util
from pathlib import Path

import h5py
import keras
import numpy as np
from keras import layers, ops


class AttentionWeightedAverage(layers.Layer):
    """Computes a weighted mean over time. The weight of each step comes from a learned vector."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 1), name="attention_W")

    def call(self, x):
        scores = ops.squeeze(ops.matmul(x, self.w), -1)
        weights = ops.exp(scores - ops.max(scores, axis=-1, keepdims=True))
        weights = weights / (ops.sum(weights, axis=1, keepdims=True) + 1e-7)
        return ops.sum(x * ops.expand_dims(weights, -1), axis=1)


def make():
    ids = keras.Input((40,), dtype="int32", name="input")
    embedded = layers.Embedding(465, 100, name="embedding")(ids)
    first = layers.LSTM(128, return_sequences=True, name="rnn_1")(embedded)
    second = layers.LSTM(128, return_sequences=True, name="rnn_2")(first)
    mean = AttentionWeightedAverage(name="attention")(layers.Concatenate(name="rnn_concat")([embedded, first, second]))
    model = keras.Model(ids, layers.Dense(465, activation="softmax", name="output")(mean))
    package = importlib.util.find_spec("textgenrnn").submodule_search_locations[0]
    with h5py.File(Path(package) / "textgenrnn_weights.hdf5") as file:
        for layer in model.layers:
            arrays = [file[layer.name][name][()] for name in file[layer.name].attrs["weight_names"]]
            layer.set_weights(from_cudnn(*arrays) if isinstance(layer, layers.LSTM) else arrays)
    return model


def from_cudnn(kernel, recurrent, bias):
    """Converts the saved weights of a CuDNNLSTM to the weights of an LSTM. Adds the two biases and transposes each
    gate's kernel."""

    def gates(weight, turn):
        return np.hstack([turn(part) for part in np.hsplit(weight, 4)])

    return [
        gates(kernel, lambda part: part.T.reshape(part.shape, order="F")),
        gates(recurrent, lambda part: part.T),
        np.sum(np.split(bias, 2), axis=0),
    ]
