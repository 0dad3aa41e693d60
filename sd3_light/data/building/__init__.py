"""From sources to shards: the catalogue of inputs, the cache plan, claims among processes, and decoding."""
