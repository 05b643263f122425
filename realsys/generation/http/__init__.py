"""Requests and answers of generation servers as JSON, and a client of one server. No torch.

``served_engine.py`` is what the HTTP application asks of an engine.
"""
