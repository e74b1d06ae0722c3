"""Token shards, deterministic sampling, packing and held-out splits."""
