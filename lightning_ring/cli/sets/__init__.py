"""Commands for packed sets: ``lightning-ring ls | stat | delete | relabel | annotate | merge | compact | prune``."""
