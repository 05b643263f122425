"""Plays a corpus of exploits and honest paraphrases against any reward rule. No torch."""
