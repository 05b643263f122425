"""Weight publication from trainers to generation servers: versioned, in buckets, checksummed."""
