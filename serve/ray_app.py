"""Keeps the import path that the Ray Serve application had in version 0.1.0; see ``deploy/ray_app.py``."""

from .deploy.ray_app import add_inference_service, app

__all__ = ["add_inference_service", "app"]
