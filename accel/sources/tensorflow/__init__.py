"""TensorFlow models. ``source`` and ``process`` run in the main process, and all other files run only in the TensorFlow
process.

Takes a SavedModel, a Keras file, a frozen graph, a TF1 checkpoint, a TFLite file or a factory. Returns an artifact of
kind ``tensorflow`` or ``tflite``. ``model`` has the functions that run the model, describe it and count its operators.
"""
