"""The master worker: walks the dataflow graph and holds metadata only.

``master_worker.py`` is THE MAIN LOOP; ``build.py`` sets it up.
"""
