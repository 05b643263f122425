"""Agents: what is asked of the policy, turn by turn. Looked up by name (realsys.api.registry)."""
