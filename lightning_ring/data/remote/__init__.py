"""Shards in an object store or on an HTTP server, read through a cache on the local disk."""
