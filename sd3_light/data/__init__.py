"""From images and captions to batches: sources, buckets, shards, order, stream and loader."""
