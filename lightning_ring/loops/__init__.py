"""Loops of one's own: what keeps the replicas of a module together where no Trainer runs the
training.
"""
