"""The stages, one a module or package, each with `run`; they never import one another, but all may run `check`."""
