"""The pages about a cache."""
