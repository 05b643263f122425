"""The store on etcd: for a site's server, and for one that a job starts for itself.

``store.py`` is the NameResolve, ``client.py`` the few calls it makes, ``channels.py`` the servers they
go to, ``protocol.py`` the wire format. Imported by ``open.py`` when an address says etcd, and not
before: gRPC is heavy and must not be loaded by what forks.
"""
