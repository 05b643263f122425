"""A trial's folder: its paths, records, lineage, and the snapshot of the code in it.

``records.py`` defines the files; every verb and worker reads a trial through it.
"""
