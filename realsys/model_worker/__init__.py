"""Model workers: hold shards and tensors, run interfaces on engines."""
