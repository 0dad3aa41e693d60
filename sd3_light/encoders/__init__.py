"""The frozen parts: the VAE and the three text encoders of an SD3 folder."""
