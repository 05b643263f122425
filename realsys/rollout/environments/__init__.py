"""Built-in environments, which respond to an agent's turns and score them. Looked up by name
(realsys.api.registry). Those that are others' (OpenEnv, gymnasium, MCP) have their arguments in
environment_arguments.py.
"""
