"""SD3-Light: pretrain and fine-tune SD3-style text-to-image models."""

__version__ = "0.1.0"
