"""Forward pass of generation: decoder, attention over cached keys and values, cache slots."""
