"""Which prompts are generated when, and which answers are trained on: pure decisions."""
