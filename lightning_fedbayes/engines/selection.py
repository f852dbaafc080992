"""The fusion rule chosen anew in every round, by how well its posterior predicts held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import lightning as L

from lightning_fedbayes.engines.round import Admitted, ClientUpdate, RoundFusion, RoundResult
from lightning_fedbayes.engines.scoring import Score
from lightning_fedbayes.errors import FederationError, FusionError
from lightning_fedbayes.fusion import FusionRule, Memory, get_rule, rule_name
from lightning_fedbayes.modules import BayesianModule

CANDIDATES = (
    "weighted_average", "weighted_sum", "linear_pool", "reverse_kl_barycenter", "wasserstein_barycenter", "conflation",
    "weighted_conflation",
)
"""What ``fusion="auto"`` chooses from."""


class AutoFusion:
    """Scores several rules on held-out data at the server, in every round, and takes the best.

    ::

        FederatedBayes(fusion="auto")                                  # the streaming rules, by negative log-likelihood
        FederatedBayes(fusion=AutoFusion(["rklb", "linear_pool", AlphaBarycenter(0.5)]))

    The held-out data are the Trainer's validation data, which the server has to have. Scores of the chosen rule on the
    same data are optimistic; test on others. Rules that cannot fuse a round's clients drop out of that round.

    When to use it: no rule is best everywhere ([BA-BFL], [FBDL]), and the server holds some data.

    Args:
        candidates: names or rule objects, at least two.
        score: the mean loss of a module on a batch, the lower the better; None: the negative log-likelihood of what
            ``predict_step`` says, for modules of this package.

    Raises:
        FusionError: fewer than two candidates, one twice, or an unknown name.
    """

    def __init__(self, candidates: Sequence[str | FusionRule] = CANDIDATES, score: Score | None = None) -> None:
        self.rules = tuple(get_rule(candidate) for candidate in candidates)
        self.names = tuple(names_of(self.rules))
        self.score = score
        if len(self.rules) < 2:
            raise FusionError(f"AutoFusion chooses between rules, and {list(candidates)} is not two; give two or more")
        if len(set(self.names)) < len(self.names):
            raise FusionError(f"AutoFusion: {list(self.names)} names a rule twice; give each once")

    def check(self, module: L.LightningModule) -> None:
        """Raise FederationError if ``module`` cannot be scored."""
        if self.score is None and not isinstance(module, BayesianModule):
            raise FederationError(
                f"fusion='auto' does not know how to score a {type(module).__name__}: pass "
                "AutoFusion(score=lambda module, batch: ...), the mean loss of the module on a batch"
            )


def names_of(rules: Iterable[FusionRule]) -> Iterator[str]:
    """A name for each rule, with its arguments where there are any."""
    for rule in rules:
        options = {
            key: next(names_of([value])) if isinstance(value, FusionRule) else value
            for key, value in vars(rule).items()
            if isinstance(value, int | float | str | FusionRule) and key not in ("uses_weights", "needs_previous")
        }
        described = ", ".join(f"{key}={value}" for key, value in options.items())
        yield rule_name(rule) + (f"({described})" if described else "")


class RoundSelection:
    """One :class:`~lightning_fedbayes.engines.round.RoundFusion` per candidate, and the one that predicts best.

    Args:
        auto: the candidates.
        fusions: makes the fusion of a rule with its memory.
        memory: name of a candidate → what it remembers.
    """

    def __init__(
        self, auto: AutoFusion, fusions: Callable[[FusionRule, Memory | None], RoundFusion], memory: Memory
    ) -> None:
        self.auto = auto
        self.memory = memory
        self._fusions = [fusions(rule, memory.get(name)) for rule, name in zip(auto.rules, auto.names, strict=True)]
        self.processes = self._fusions[0].processes

    def __len__(self) -> int:
        return len(self._fusions[0])

    def add(self, update: ClientUpdate) -> None:
        """Admit one client's update to all of them; see :meth:`RoundFusion.add`."""
        for fusion in self._fusions:
            fusion.add(update)

    def admitted(self) -> tuple[Admitted, ...]:
        """For each candidate what the other processes have to know of this one's clients."""
        return tuple(fusion.admitted() for fusion in self._fusions)

    def finish(
        self, loss: Callable[[RoundResult], float], everyone: Sequence[Sequence[Admitted]]
    ) -> tuple[RoundResult, dict[str, float]]:
        """The best candidate.

        Args:
            loss: of a candidate's result on held-out data; not finite: the candidate drops out. The first process's
                counts.
            everyone: what each process has :meth:`admitted`.

        Returns: its result, with the memories of all candidates by their names, and every candidate's loss.

        Raises:
            FusionError: no candidate could fuse, or be scored.
        """
        results, losses, memory = {}, {}, dict(self.memory)
        reason = "no candidate has a finite loss on the validation data"
        for name, fusion, admitted in zip(self.auto.names, self._fusions, zip(*everyone), strict=True):
            try:
                results[name] = fusion.finish(admitted)
            except FusionError as error:
                reason = str(error)
                continue
            memory[name] = results[name].memory
            losses[name] = loss(results[name])
        losses = self.processes.broadcast(losses)
        finite = {name: value for name, value in losses.items() if math.isfinite(value)}
        if not finite:
            raise FusionError(f"fusion='auto': none of {', '.join(self.auto.names)} can be used: {reason}")
        best = results[min(finite, key=lambda name: finite[name])]
        return replace(best, memory=memory), losses
