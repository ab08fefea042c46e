"""Plain tar shards in WebDataset's layout, with an index beside them for random access."""
