"""Batches with tensors: packed samples, splitting and padding, files of samples."""
