"""Time to a posterior without rounds, where some clients are slow."""
