"""Environments: what answers an agent's turns and scores them. Looked up by name (realsys.api.registry)."""
