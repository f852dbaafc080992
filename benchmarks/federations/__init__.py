"""Federations with natural clients, and others with usual skews: which method serves whom, and at what cost."""
