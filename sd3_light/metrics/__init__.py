"""How good a model is, in numbers."""
