"""Flow matching: time, text dropout and the objective, as small functions of tensors."""
