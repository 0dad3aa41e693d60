"""Training: the verb, the loop and the driver around it."""
