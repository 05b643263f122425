"""Pairs of answers, of which one is preferred; enter at preference_pairs.py."""
