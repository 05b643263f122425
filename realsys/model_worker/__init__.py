"""Model workers hold model shards and batch tensors, and run interfaces on engines."""
