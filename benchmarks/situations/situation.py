"""A situation that people describe in a public thread, and what becomes of it in a federation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import Dataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FedBayesError
from tests.zoo import case as zoo
from tests.zoo.case import EQUAL, REFUSED, SIZES, Case

DISTRIBUTION, DIFFERENT, ERROR = "in distribution", "different", "error"
ENGINES = ("sequential", "vectorized", "auto")
ALONE = {"vectorized": REFUSED}
NEVER = {**ALONE, "sequential": REFUSED}
SEEDS, MEANS, SPREAD = 48, 6.0, 2.5
"""Runs of each engine where noise is drawn. By how many standard errors the means of parameters, and the logarithms of
their total variance, may differ from plain Lightning's."""

Learnt = tuple[dict[str, Tensor], fb.FederatedBayes]


class Begins(L.Callback):
    """Loads a state into the module when its layers and optimizers are there."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = {name.removeprefix("_orig_mod."): value for name, value in state.items()}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.state:
            pl_module.load_state_dict({**pl_module.state_dict(), **self.state})


class Positions(zoo.Positions):
    """Puts schedules that are none of torch's, which are told the epoch, to where a round begins."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        others = [each.scheduler for each in trainer.lr_scheduler_configs if hasattr(each.scheduler, "step_update")]
        if not others:
            super().on_train_start(trainer, pl_module)
        for schedule in others:
            schedule.step(self.first)


def loop_of_plain_fits(case: Case, again: int = 0) -> dict[str, Tensor]:
    """Federated averaging by plain fits, each of a module made anew: it may not allow copies, or make layers late.

    Args:
        case: a case.
        again: round of a second call of ``fit``, in which schedules begin anew.
    """
    shared, kinds = dict[str, Tensor](), dict[str, torch.dtype]()
    for round in range(case.rounds):
        steps, total = (round - again if round >= again else round), dict[str, Tensor]()
        weights = list[int]()
        for client, dataset in enumerate(zoo.parts(case, SIZES).values()):
            own = case.module()
            zoo.fit(case, own, dataset, [Begins(shared), Positions(case, client, steps)], round + 1, round)
            weights.append(len(dataset))  # pyright: ignore[reportArgumentType]
            for name, value in own.state_dict().items():
                total[name] = total.get(name, 0) + value.double() * weights[-1]
                kinds[name] = value.dtype
        shared = {
            name: (value if kinds[name].is_floating_point else value.round()).to(kinds[name])
            for name, value in ((name, value / sum(weights)) for name, value in total.items())
        }
    return {name: value for name, value in shared.items() if value.is_floating_point()}


@dataclass(frozen=True)
class Situation(Case):
    """A case of the zoo with the thread that it is from.

    Args:
        address: of the thread.
        asks: what people do there.
        why: words of the refusal, of the sequential engine if that refuses; which hold what the reason is.
        federate: trains as a federation, in one fit.
        plain: trains one client by plain Lightning.
        loop: trains three clients by a loop of plain fits.
        data_noise: examples are drawn when they are read: each engine agrees with plain Lightning in distribution.
    """

    address: str = ""
    asks: str = ""
    why: str = ""
    federate: Callable[[Case, str, Sequence[int]], Learnt] = zoo.federated
    plain: Callable[[Case], dict[str, Tensor]] = zoo.plain
    loop: Callable[[Case], dict[str, Tensor]] = loop_of_plain_fits
    data_noise: bool = False

    def declared(self, engine: str) -> str:
        """Return the verdict on an engine that the table has."""
        word = self.vectorized if engine == "vectorized" else self.sequential
        return DISTRIBUTION if word == EQUAL and self.is_noisy(engine == "vectorized") else word

    def is_noisy(self, stacked: bool) -> bool:
        """Return True if another stream of random numbers than in a plain fit decides."""
        return self.data_noise or (self.noisy and stacked)


@dataclass(frozen=True)
class Verdict:
    """What came of a federation beside plain Lightning: a word, and a difference or a message."""

    word: str
    note: str = ""


SITUATIONS: list[Situation] = []
"""All of them, in the order of the table."""


class Group:
    """Collects the situations of a part of the table.

    Args:
        name: of the part.
        packages: that they need beside the test environment.
    """

    def __init__(self, name: str, *packages: str) -> None:
        self.name, self.packages = name, packages
        GROUPS[name] = self

    def __call__(self, name: str, address: str, asks: str, **options: Any) -> Callable[[Any], Any]:
        """Decorate what makes the module of a situation."""

        def keep(make: Callable[[], L.LightningModule]) -> Any:
            SITUATIONS.append(Situation(self.name, name, make, address=address, asks=asks, **options))
            return make

        return keep


GROUPS: dict[str, Group] = {}


class Mapped(Dataset):
    """The examples of a data set in another form."""

    def __init__(self, dataset: Any, form: Callable[..., Any]) -> None:
        self.dataset, self.form = dataset, form

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.form(*self.dataset[index])


def mapped(form: Callable[..., Any]) -> Callable[[Any], Dataset]:
    """Return a function of a data set that gives its examples another ``form``."""
    return lambda dataset: Mapped(dataset, form)


def verdicts(case: Situation) -> dict[str, Verdict]:
    """Train ``case`` with one client and with three, by each engine; return engine → the worse of the two verdicts."""
    kept = {"federation": {"keep": ["optimizer"], **case.federation}} if case.keeps else {"rounds": 1}
    one = replace(case, **kept)
    of_one, of_three = cache(lambda: case.plain(one)), cache(lambda: case.loop(case))
    found = {}
    for engine in ENGINES:
        both = [
            _compared(one, engine, (sum(SIZES),), of_one),
            _compared(case, engine, SIZES, of_three),
        ]
        found[engine] = max(both, key=lambda each: (each.word == ERROR, each.word == DIFFERENT, each.word == REFUSED))
        if len({each.word for each in both} & {EQUAL, REFUSED}) == 2 and engine != "auto":
            found[engine] = Verdict(DIFFERENT, f"one client: {both[0]}; three: {both[1]}")
    return found


def _compared(
    case: Situation, engine: str, sizes: Sequence[int], reference: Callable[[], dict[str, Tensor]]
) -> Verdict:
    """Train as a federation, and compare with what plain Lightning has learnt."""
    try:
        learnt, federation = case.federate(case, engine, sizes)
    except FedBayesError as refusal:
        trained = "rounds in a row" in str(refusal)
        return Verdict(ERROR if trained else REFUSED, str(refusal))
    except Exception as error:
        reference()  # raises, too, if plain Lightning cannot train it
        return Verdict(ERROR, f"{type(error).__name__}: {error}")
    if any(row["failed_clients"] for row in federation.history) or len(federation.history) != case.rounds:
        return Verdict(ERROR, f"{[row['failed_clients'] for row in federation.history]} clients failed")
    if case.is_noisy(federation.federation.engine.name != "sequential"):
        furthest = 0.0 if engine == "auto" else _apart(case, engine, sizes)
        return Verdict(DISTRIBUTION if furthest <= 1 else DIFFERENT, f"{furthest:.2f} of what chance allows")
    largest = zoo.difference(learnt, reference())
    return Verdict(EQUAL if largest <= case.tolerance else DIFFERENT, f"{largest:.1e}")


def _apart(case: Situation, engine: str, sizes: Sequence[int]) -> float:
    """Return how far plain Lightning's and an engine's distributions over seeds are apart, 1 at the limits."""
    both = []
    for plain in (True, False):
        drawn = []
        for seed in range(SEEDS):
            seeded = replace(case, federation={**case.federation, "seed": seed + (0 if plain else SEEDS)})
            if plain:
                learnt = case.plain(seeded) if len(sizes) == 1 else case.loop(seeded)
            else:
                learnt, _ = case.federate(seeded, engine, sizes)
            drawn.append(torch.cat([value.double().flatten() for value in learnt.values()]))
        both.append(torch.stack(drawn))
    ours, theirs = both
    variance = ours.var(0) + theirs.var(0)
    moves = variance > 1e-12
    apart = (ours.mean(0) - theirs.mean(0)).abs()
    means = apart[moves] / (variance[moves] / SEEDS).sqrt() / MEANS
    still = apart[~moves] / case.tolerance
    spread = (ours.var(0).sum() / theirs.var(0).sum()).log().abs() / (4 / SEEDS) ** 0.5 / SPREAD
    return max(float(each) for each in (*means, *still, spread))
