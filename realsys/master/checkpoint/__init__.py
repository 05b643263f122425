"""Recovery checkpoints and what is published of them; fenced by the attempt number."""
