"""report.html: one page about a trial, made from its folder alone.

``report.py`` is the entrance, ``trial_story.py`` what it reads.
"""
