"""TensorFlow models: ``source`` and ``process`` run in the main process, all other files only in the TensorFlow
process.

In: a SavedModel, a Keras file, a frozen graph, a TF1 checkpoint, a TFLite file or a factory. Out: an artifact of kind
``tensorflow`` or ``tflite``, and functions that run, describe and count the model (``model``).
"""
