"""A trial's folder: its paths, its records, its lineage, and the copy of the code in it.

``records.py`` defines the files; every verb and worker reads a trial through it.
"""
