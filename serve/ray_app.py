"""Keeps the import path of version 0.1.0 for the Ray Serve application in ``deploy/ray_app.py``."""

from .deploy.ray_app import add_inference_service, app

__all__ = ["add_inference_service", "app"]
