"""Tensor transfer between workers: a worker's store, its server, and the client.

Through shared memory on one host, over encrypted TCP streams between hosts.
"""
