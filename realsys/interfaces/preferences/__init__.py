"""Models trained on pairs of answers, and scoring by one."""
