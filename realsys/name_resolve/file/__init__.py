"""The name-resolution store in a shared folder, without a server: for one machine or a cluster's
file system."""
