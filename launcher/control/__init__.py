"""Changing running trials: stop, scale, exec, tell; and removing or replaying finished ones."""
