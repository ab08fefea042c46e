"""From image files to shards: what ``lightning-ring pack`` does."""
