"""Commands for packed sets: ``lightning-ring delete | relabel | annotate | merge | ls | stat | prune``."""
