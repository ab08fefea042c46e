"""Sets that grow: each change of packed shards writes a new generation beside those that are there."""
