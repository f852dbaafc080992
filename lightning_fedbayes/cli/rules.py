"""``fedbayes rules``: all registered fusion rules, by family."""

import inspect
import textwrap
from collections.abc import Sequence

from lightning_fedbayes.cli.messages import WIDTH, plain
from lightning_fedbayes.fusion import FusionRule, SumRule, available_fusions, get_rule, rule_name
from lightning_fedbayes.fusion.inferred import InferredRule
from lightning_fedbayes.fusion.products import AlphaBarycenter
from lightning_fedbayes.fusion.registry import FunctionRule
from lightning_fedbayes.fusion.robust import CoordinateMedian, Preaggregation, TrimmedMean
from lightning_fedbayes.fusion.rule import ReliabilityRule

FAMILIES: dict[str, tuple[type[FusionRule], ...]] = {
    "inferred: estimate each client's reliability from all rounds": (InferredRule,),
    "before a robust rule: preprocess the client posteriors, which another rule fuses": (Preaggregation,),
    "robust: bound the influence of a minority of clients": (ReliabilityRule, CoordinateMedian, TrimmedMean),
    "interpolating: hold all clients of a round": (AlphaBarycenter,),
    "streaming: memory does not grow with the clients": (SumRule,),
}
"""Title → base classes. A rule belongs to the first family with one of its base classes."""
OTHER = "others"


def listing(names: Sequence[str] | None = None) -> str:
    """Return every rule, or those of ``names``, with aliases, needs (weights, previous posterior) and first line.

    >>> print(listing(["conflation"]))
    streaming: memory does not grow with the clients
      conflation (inverse_variance)  [no weights]
          Normalised product of the client densities, inverse-variance weighting.
    """
    families: dict[str, list[str]] = {title: [] for title in (*reversed(FAMILIES), OTHER)}
    for name in available_fusions() if names is None else names:
        families[family(get_rule(name))].append(_entry(name))
    return "\n\n".join("\n".join([title, *entries]) for title, entries in families.items() if entries)


def family(rule: FusionRule) -> str:
    """Return the title of a rule's family."""
    return next((title for title, bases in FAMILIES.items() if isinstance(rule, bases)), OTHER)


def aliases_of(name: str) -> list[str]:
    """Return the other names of a rule, sorted.

    >>> aliases_of("linear_pool")
    ['kl_barycenter', 'lp']
    """
    return [other for other in available_fusions(aliases=True) if other != name and rule_name(other) == name]


def _entry(name: str) -> str:
    rule = get_rule(name)
    document = inspect.getdoc(rule.function if isinstance(rule, FunctionRule) else type(rule)) or "No description."
    others = ", ".join(aliases_of(name))
    notes = ["takes weights" if rule.uses_weights else "no weights"]
    notes += ["needs the previous posterior"] if rule.needs_previous else []
    head = f"  {name}{f' ({others})' if others else ''}  [{', '.join(notes)}]"
    indent = " " * 6
    body = textwrap.fill(plain(document.splitlines()[0]), WIDTH, initial_indent=indent, subsequent_indent=indent)
    return f"{head}\n{body}"
