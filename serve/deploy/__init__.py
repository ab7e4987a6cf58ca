"""Deploys the server on several machines, with Kubernetes, KServe or Ray Serve.

Converts the options of `accel serve` into YAML for `kubectl apply -f`, or into an application for Ray's `serve run`.
"""
