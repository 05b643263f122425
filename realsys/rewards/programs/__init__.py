"""Answers that are programs: the fenced block that holds one, and its tests in boxes of sandbox/.

Begin with code_rule.py.
"""
