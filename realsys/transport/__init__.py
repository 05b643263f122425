"""Transport: small typed control messages between the processes of one trial.

``messages.py`` says what is sent, ``codec.py`` turns it into bytes, ``keys.py`` holds the trial's
CURVE keys, ``server.py`` and ``client.py`` carry requests and replies. Tensors go over
``realsys.data.transfer``.
"""
