"""Tensors: packed samples, the store of a worker, transfers between workers."""
