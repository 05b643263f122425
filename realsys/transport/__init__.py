"""Transport: small typed control messages between the processes of one trial.

``messages.py`` defines the frames, ``codec.py`` encodes them, ``curve_keys.py`` holds the trial's
CURVE keys, ``server.py`` and ``client.py`` carry requests and replies. Tensors go over
``realsys.data.transfer``.
"""
