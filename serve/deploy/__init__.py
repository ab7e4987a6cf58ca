"""Deployments beyond one machine: manifests for Kubernetes and KServe, and a Ray Serve application.

In: the options of `accel serve`. Out: YAML for `kubectl apply -f`, or an application for `serve run`.
"""
