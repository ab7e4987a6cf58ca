"""Opens TensorFlow models. The modules ``source`` and ``process`` run in the main process, and all other modules run
only in the TensorFlow process.

Takes a SavedModel, a Keras file, a frozen graph, a TF1 checkpoint, a TFLite file or a factory. Returns an artifact of
kind ``tensorflow`` or ``tflite``. The module ``model`` runs a model, describes it and counts its operators.
"""
