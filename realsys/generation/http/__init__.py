"""JSON format of generation servers' requests and answers, and a client of one server. No torch.

``served_engine.py`` is the engine interface that the HTTP application uses.
"""
