"""Measurements inside the tools people train with: Lightning, Transformers, TensorBoard, W&B.

:mod:`~newton_summary.integrations.monitor` has what they share, and is for your own training loop.
Each of the other modules needs the package it is named after.
"""
