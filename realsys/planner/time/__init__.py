"""Seconds of calls from formulas or profiles, and of steps by simulation (pure)."""
