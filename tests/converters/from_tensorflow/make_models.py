"""Writes small TensorFlow models of every supported format into the given folder. The tests run this script in a
separate process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf


def keras_models() -> None:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    net = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            layers.BatchNormalization(),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.5),
            layers.Dense(5, activation="softmax"),
        ]
    )
    net.save("sequential.keras")
    net.save("sequential.h5")
    net.save_weights("only.weights.h5")
    net.export("sequential", verbose=False)
    ids = keras.Input((None,), dtype="int32", name="ids")
    x = layers.Embedding(50, 16)(ids)
    x = x + layers.MultiHeadAttention(2, 8)(x, x)
    x = layers.LSTM(12)(x)
    model = keras.Model(ids, [layers.Dense(3, name="zeta")(x), layers.Dense(3, name="alpha")(x)])
    model.save("functional.keras")
    left, right = keras.Input((None, 4), name="left"), keras.Input((None, 4), name="right")
    keras.Model([left, right], layers.Dense(2, name="both")(left * right)).save("two.keras")
    code = keras.Input((3,), name="x")
    keras.Model(code, layers.Lambda(lambda t: t + 1)(code)).save("lambda.keras")
    keras.Sequential([layers.Dense(2)]).save("unbuilt.keras")
    city = keras.Input((1,), name="city", dtype="string")
    code = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")(city)
    keras.Model(city, layers.Dense(1)(code)).save("lookup.keras")


def graphs() -> None:
    v1 = tf.compat.v1
    for name, dropout in (("frozen.pb", None), ("dropout.pb", "new"), ("dropout_tf1.pb", "old")):
        with tf.Graph().as_default(), v1.Session() as session:
            v1.set_random_seed(0)
            x = v1.placeholder(tf.float32, [None, 6], name="x")
            hidden = plain = tf.nn.relu(tf.matmul(x, v1.get_variable("w", [6, 4])))
            if dropout == "new":
                hidden = v1.nn.dropout(hidden, rate=0.3)
            if dropout == "old":  # TensorFlow 1.4 wrote dropout with these operators
                keep = tf.constant(0.7)
                noise = tf.floor(keep + tf.random.uniform(tf.shape(hidden)))
                hidden = tf.realdiv(hidden, keep) * noise
            last = v1.get_variable("v", [4, 2])
            tf.identity(tf.matmul(hidden, last), name="logits")
            without = tf.matmul(plain, last)
            session.run(v1.global_variables_initializer())
            graph = v1.graph_util.convert_variables_to_constants(session, session.graph.as_graph_def(), ["logits"])
            Path(name).write_bytes(graph.SerializeToString())
            feeds = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
            np.savez(f"{name}.npz", x=feeds, logits=session.run(without, {x: feeds}))
            if dropout is None:
                v1.train.Saver().save(session, "checkpoint/model")
                logits = session.graph.get_tensor_by_name("logits:0")
                v1.saved_model.simple_save(session, "tf1", {"x": x}, {"logits": logits})
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [2], name="x")
        tf.identity(x + tf.random.normal([2]), name="noise")
        Path("noise.pb").write_bytes(v1.get_default_graph().as_graph_def().SerializeToString())


class Text(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="text")])
    def measure(self, text: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"length": tf.strings.length(text)}


class TwoSignatures(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = tf.Variable(2.0)

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x")])
    def double(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"doubled": x * self.scale}

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x")])
    def square(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"squared": x * x * self.scale}


def saved_models() -> None:
    text, two = Text(), TwoSignatures()
    tf.saved_model.save(text, "strings", signatures=text.measure)
    tf.saved_model.save(two, "two_signatures", signatures={"double": two.double, "square": two.square})
    tf.saved_model.save(TwoSignatures(), "no_signatures", signatures={})


class InTraining(tf.Module):
    """Wraps a Keras model in a signature that is traced with training=True."""

    def __init__(self, layer: keras.Layer) -> None:
        super().__init__()
        keras.utils.set_random_seed(0)
        x = keras.Input((6,), name="x")
        hidden = layer(keras.layers.Dense(4, activation="relu")(x))
        self.model = keras.Model(x, keras.layers.Dense(2, name="logits")(hidden))
        state = [layer.seed_generator.state] if hasattr(layer, "seed_generator") else []
        self.weights = [v.value for v in (*self.model.variables, *state)]

    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float32, name="x")])
    def run(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"logits": self.model(x, training=True)}


class Sampler(tf.Module):
    """Draws random integers at every call. The name of the sampling op doesn't contain "random"."""

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x")])
    def run(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        drawn = tf.random.uniform_candidate_sampler(tf.zeros([1, 1], tf.int64), 1, 4, False, 1000)
        return {"twice": x * 2, "drawn": drawn.sampled_candidates}


class Noise(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([2, 64], tf.float32, name="x")])
    def run(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"place": tf.argmax(x * 1e-3 + tf.random.uniform([2, 64]), 1, tf.int32)}


def models_in_training() -> None:
    dropout, norm = InTraining(keras.layers.Dropout(0.5)), InTraining(keras.layers.BatchNormalization())
    tf.saved_model.save(dropout, "dropout", signatures=dropout.run)
    tf.saved_model.save(norm, "norm", signatures=norm.run)
    feeds = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    np.savez("dropout.npz", x=feeds, logits=dropout.model(feeds, training=False))
    sampler, noise = Sampler(), Noise()
    tf.saved_model.save(sampler, "sampler", signatures=sampler.run)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([noise.run.get_concrete_function()], noise)
    Path("noise.tflite").write_bytes(converter.convert())


def tflite_models() -> None:
    def convert(source: str, data: np.ndarray | None = None) -> bytes:
        converter = tf.lite.TFLiteConverter.from_saved_model(source)
        if data is not None:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            converter.representative_dataset = lambda: ([sample[None]] for sample in data)
            converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
            converter.inference_input_type = converter.inference_output_type = tf.int8
        return bytes(converter.convert())

    images = np.random.default_rng(0).random((20, 8, 8, 3)).astype(np.float32)
    Path("float.tflite").write_bytes(convert("sequential"))
    Path("int8.tflite").write_bytes(convert("sequential", images))

    class Gelu(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([1, 6, 4], tf.float32, name="x")])
        def run(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
            return {"y": tf.nn.gelu(x)}

    gelu = Gelu()
    tf.saved_model.save(gelu, "gelu", signatures=gelu.run)
    converter = tf.lite.TFLiteConverter.from_saved_model("gelu")
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([sample[None, :6, :4, 0]] for sample in images)
    Path("gelu_int8.tflite").write_bytes(converter.convert())


class Foldable(tf.Module):
    """Multiplies the input by a weight that nine operators compute from constants. ONNX lacks two of the nine
    operators."""

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, name="x")])
    def run(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"y": tf.matmul(x, self.weight())}

    @staticmethod
    def weight() -> tf.Tensor:
        table = tf.reshape(tf.range(16, dtype=tf.float32), [4, 4])
        return tf.matmul(tf.linalg.inv(table + 2.0 * tf.eye(4)), tf.math.lgamma(table + 1.0)) / tf.reduce_max(table)


def foldable_models() -> None:
    v1 = tf.compat.v1
    foldable = Foldable()
    tf.saved_model.save(foldable, "foldable", signatures=foldable.run)
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        tf.matmul(x, Foldable.weight(), name="y")
        Path("foldable.pb").write_bytes(graph.as_graph_def().SerializeToString())
    # TFLite's converter already folds the constant operators of the class Foldable. Therefore foldable.tflite holds
    # another model, with 16-bit weights. TFLite's converter doesn't fold the operators that convert these weights to
    # float32.
    converter = tf.lite.TFLiteConverter.from_saved_model("sequential")
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.target_spec.supported_types = [tf.float16]
    Path("foldable.tflite").write_bytes(converter.convert())


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    keras_models()
    graphs()
    saved_models()
    models_in_training()
    tflite_models()
    foldable_models()
