"""Exports: trained weights as models that other programs load, each verified before it is published (law 6)."""
