"""Name resolution: the key-value store where workers register, heartbeat and find each other.

``store.py`` defines what every store guarantees, ``key_table.py`` which keys exist, ``open.py``
picks a store by its address. Values are small bytes; tensors, logs and configurations do not belong
here.
"""
