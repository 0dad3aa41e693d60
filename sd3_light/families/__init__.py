"""The model families; only `core.registry` imports them, by name."""
