"""Pages about runs and caches."""
