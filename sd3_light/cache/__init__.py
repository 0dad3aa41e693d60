"""The cache stage: images and captions become shards."""
