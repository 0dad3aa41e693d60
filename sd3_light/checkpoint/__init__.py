"""What a run needs to go on: which tensors and counters (state), and how they lie on disk (store)."""
