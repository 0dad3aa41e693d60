"""Trained weights as models that other programs load, each proven before it is announced (law 6)."""
