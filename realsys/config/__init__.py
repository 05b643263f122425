"""Typed settings: dotted overrides and YAML onto an experiment's dataclass, all problems at once."""
