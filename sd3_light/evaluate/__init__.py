"""Metrics of a model: validation loss, composition score, comparison with true images."""
