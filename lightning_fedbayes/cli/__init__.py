"""The command ``fedbayes``: federations from YAML files, the list of fusion rules, comparisons and pictures."""

from lightning_fedbayes.cli.main import main as main
