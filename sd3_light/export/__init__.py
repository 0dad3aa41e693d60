"""Exports: trained weights as models that other programs load, each proven before it is published (law 6)."""
