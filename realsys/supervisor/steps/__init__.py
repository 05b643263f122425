"""Workers as processes of this machine or as Slurm steps, behind one interface (``steps.py``)."""
