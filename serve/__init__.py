"""The inference server. `accel infer` uses `client`. Imports go downwards only:

    deploy > process > transports > core > models > scheduling > generate | security | client > protocol

In: a repository of models in Triton's layout, and `ServeOptions`. Out: the Open Inference Protocol over gRPC and HTTP.
"""
