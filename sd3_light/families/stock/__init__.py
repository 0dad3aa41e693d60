"""What families of stock diffusers denoisers share; a family adds how it encodes texts and calls its denoiser."""
