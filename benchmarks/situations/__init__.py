"""Situations from public threads, each trained by plain Lightning and as a federation."""
