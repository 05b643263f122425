"""Built-in agents, which query the policy turn by turn. Looked up by name (realsys.api.registry)."""
