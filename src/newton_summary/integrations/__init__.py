"""Measurements inside the tools people train with: Lightning, Transformers, TensorBoard, W&B.

:mod:`~newton_summary.integrations.monitor` has what they share, and serves a training loop of your
own. Each of the other modules needs the package it is named after.
"""
