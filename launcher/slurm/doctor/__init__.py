"""`realsys doctor`: checks a site from the login node and from a compute node.

``doctor.py`` runs the checks; files that end in ``checks`` evaluate the results (pure).
"""
