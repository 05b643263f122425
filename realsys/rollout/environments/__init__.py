"""Built-in environments, which respond to an agent's turns and score them. Looked up by name
(realsys.api.registry).
"""
