"""`realsys doctor`: checks of a site from the login node and from a compute node.

``doctor.py`` runs the checks; files that end in ``checks`` judge what was found (pure).
"""
