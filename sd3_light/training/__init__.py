"""Training: the loop, the driver around it, the module that turns a batch into a loss, SD3's inputs, and data."""
