"""Metrics of a model: validation loss, composition score, and comparison with true images."""
