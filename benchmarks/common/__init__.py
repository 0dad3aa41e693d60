"""What several benchmarks share: each module has a part of it."""
