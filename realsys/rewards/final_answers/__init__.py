"""Where a text states its final value, what that is, and whether it equals the known one (pure)."""
