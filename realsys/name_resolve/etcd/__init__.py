"""The name-resolution store on etcd: a site's server, or one that a job starts for itself.

``etcd_store.py`` is the NameResolve, ``etcd_client.py`` the RPCs it uses, ``channels.py`` the
connections to the servers, ``protocol.py`` the wire format. Imported by ``open.py`` only for an
etcd address: gRPC is heavy and must not be loaded in a process that forks.
"""
