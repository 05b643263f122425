"""Staleness control: pure decisions on which prompts are generated when and which answers are
trained on.
"""
