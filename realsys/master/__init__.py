"""The master worker: walks the dataflow graph, holds metadata only.

``master_worker.py`` is THE MAIN LOOP; ``build.py`` wires it together.
"""
