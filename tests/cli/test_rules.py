"""The list of rules is complete, and describes each as its class does."""

import pytest

from lightning_fedbayes.cli import main
from lightning_fedbayes.cli.rules import OTHER, aliases_of, family, listing
from lightning_fedbayes.fusion import available_fusions, get_rule, register_fusion
from lightning_fedbayes.fusion.registry import unregister_fusion


def test_every_rule_and_alias_is_listed_once(capsys):
    assert main(["rules"]) == 0
    shown = capsys.readouterr().out
    heads = [line.split("  [")[0] for line in shown.splitlines() if line.startswith("  ") and line[2] != " "]
    listed = sorted(name for head in heads for name in head.replace("(", "").replace(")", "").replace(",", "").split())
    assert listed == available_fusions(aliases=True)
    assert all(len(line) <= 110 for line in shown.splitlines())
    assert not set("\\`") & set(shown)


@pytest.mark.parametrize("name", available_fusions())
def test_needs_are_those_of_the_rule_and_every_rule_has_a_family(name):
    rule, entry = get_rule(name), listing([name])
    assert ("takes weights" in entry) == rule.uses_weights
    assert ("needs the previous posterior" in entry) == rule.needs_previous
    assert family(rule) != OTHER


def test_a_users_own_rule_is_listed_with_its_first_line():
    @register_fusion("mine", aliases=("my_own",))
    def mine(posteriors, weights, previous):
        """The first client.

        And no other.
        """
        return posteriors[0]

    try:
        assert aliases_of("mine") == ["my_own"]
        assert listing(["mine"]).splitlines() == [OTHER, "  mine (my_own)  [takes weights]", "      The first client."]
    finally:
        unregister_fusion("mine")
