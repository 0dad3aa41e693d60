"""From sources to units of work: what there is, which samples make which shard, who encodes it, and its decoding."""
