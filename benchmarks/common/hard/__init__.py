"""The harder scenes of the benchmarks: up to six objects, sizes, textures and overlaps."""
