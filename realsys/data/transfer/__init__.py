"""Tensors from worker to worker: the store of a worker, its server, and the client.

On one host through shared memory, between hosts over sealed TCP streams.
"""
