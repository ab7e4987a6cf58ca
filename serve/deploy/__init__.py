"""Deployments beyond one machine: manifests for Kubernetes and KServe, and a Ray Serve application.

Turns the options of `accel serve` into YAML for `kubectl apply -f`, or into an application for `serve run`.
"""
