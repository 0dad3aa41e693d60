"""How weights learn: parameter groups, optimizers, learning-rate schedules, and running averages of weights."""
