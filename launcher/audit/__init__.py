"""Proves from a trial's folder what became of every question: `realsys audit`.

``audit_reader.py`` reads the folder into the values of ``audited_run.py``; ``ticket_fates.py`` decides what
became of each ticket, ``audit_checks.py`` what is wrong (both pure).
"""
