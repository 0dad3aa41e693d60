"""The denoiser: diffusers' MMDiT as an ordered list of layers, and what it costs."""
