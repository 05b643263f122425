"""Built-in reward rules and their safe execution."""
