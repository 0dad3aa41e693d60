"""What the pages of `inspect` and `report` share: markup, look, frame, curves and pictures.

Such a page is one file. It asks the network for nothing, and reads without its script where it has one.
"""
