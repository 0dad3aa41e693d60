"""Sampling: images from a loaded pipeline (`generate`), and grids of them (`grid`)."""
