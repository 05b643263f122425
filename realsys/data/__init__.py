"""Batches with tensors: packed samples, how they are cut and padded, and files of them."""
