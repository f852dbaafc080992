"""The command ``fedbayes``: a federation out of a YAML file, the fusion rules, comparisons and pictures."""

from lightning_fedbayes.cli.main import main

__all__ = ["main"]
