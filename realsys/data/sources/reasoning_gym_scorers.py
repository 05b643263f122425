"""Scorers of reasoning-gym that pay for what is no right answer, and those that want one form (0.1.25)."""

PAYING: dict[str, str] = {}
REFUSING: dict[str, str] = {}
UNFIT: dict[str, str] = {}
