"""Making experience: agents in environments, and the rules about how old it may be."""
