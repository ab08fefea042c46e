"""Communicators: collectives of tensors between ranks, over several transports."""
