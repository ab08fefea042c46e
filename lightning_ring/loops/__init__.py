"""Keeps the replicas of a module together in plain training loops."""
