"""Metrics of a model: validation loss and composition score."""
