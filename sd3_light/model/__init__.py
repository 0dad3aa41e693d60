"""The denoiser: diffusers' MMDiT as an ordered list of layers, its adapters and its fast blocks."""
