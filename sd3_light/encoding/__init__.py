"""The VAE and the three text encoders of an SD3 folder. They stay frozen."""
