"""Training of the parts that SD3 usually downloads, from captioned images alone: VAE, tokenizers, text encoders."""
