"""Optimizers, parameter groups, learning-rate schedules, and running averages of weights."""
