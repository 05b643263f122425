"""Harbor task directories as they are on disk: what each asks of an agent and of its box. No torch."""
