"""The runtimes, a file for each of ONNX Runtime, OpenVINO, TensorRT, ncnn, TensorFlow and PyTorch. ``base`` has their
table.

In: an artifact and session options. Out: a session that runs feeds (arrays by name) and returns outputs by name.
"""
