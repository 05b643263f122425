"""The embedded engine: continuous batching over the weights of a module in this process."""
