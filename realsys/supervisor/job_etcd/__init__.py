"""The name-resolution store of an attempt: the site's, or an etcd that the job starts for itself."""
