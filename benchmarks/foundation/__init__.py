"""Heads and adapters of pretrained networks, federated."""
