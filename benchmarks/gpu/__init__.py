"""Benchmarks of one GPU."""
