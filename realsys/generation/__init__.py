"""Text generation: the embedded engine, servers around engines, and their manager.

engine/ and decoding/ compute; served_engines/ puts one interface before the embedded engine, SGLang and
vLLM; server/ is the worker process with its HTTP API, http/ the wire format and client; manager/ routes.
"""
