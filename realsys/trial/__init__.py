"""A trial's folder: its paths, records, state, lineage, and the snapshot of the code in it.

``records.py`` defines the files; workers read one at a time through it, all that inspect a trial read it
through ``trial_reader.py``, which never raises.
"""
