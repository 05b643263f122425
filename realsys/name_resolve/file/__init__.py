"""A store in a shared folder: no server to run, for one machine or a cluster's file system."""
