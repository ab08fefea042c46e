"""A Chrome trace of every rank's steps and collectives, for https://ui.perfetto.dev. Knows comm;
not Lightning.
"""
