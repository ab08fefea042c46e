"""From image files to shards: ``lightning-ring pack``."""
