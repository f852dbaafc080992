"""Learning rates that move in every step, over a network: what a server counts, and the course of a client."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from statistics import median_low
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_fedbayes.clients.context import MOVING, Course, TrainingContext
from lightning_fedbayes.clients.states import is_equal
from lightning_fedbayes.core.errors import FederationError, check_at_least, listed, raised_as
from lightning_fedbayes.core.messages import ClientOutcome, Message
from lightning_fedbayes.server.plan import Fraction, choose_cohort

STEPS, MOVES = "schedule/steps", "schedule/moves"
"""Figures of an update: the steps of the client's optimizer in the round, and of its schedule."""
MOST_STEPS = 10**6
"""Most steps of a client in a round that are believed."""
MOST_EXAMPLES = 100.0
"""Multiple of another client's examples for which a client is believed to make more steps."""


def believed(claims: Mapping[int, Sequence[int]], max_influence: float | None) -> dict[int, list[int]]:
    r"""Return client → its steps, and the moves of its schedule, as far as they are believed.

    .. math:: s_k \le 2 m \cdot \mathrm{median}_j \, s_j \max(1, \min(n_k / n_j, 100))

    A client makes at most twice as many steps for each example as another one, by incomplete batches: so the bound of
    ``max_influence`` m ≥ 1 leaves clients alike, of whatever sizes, as they are. None: no such bound. ``claims`` are,
    by client, its examples n, steps s and moves.

    >>> believed({0: [12, 3, 3], 1: [20, 5, 5], 2: [36, 10**9, 9]}, max_influence=1.0)
    {0: [3, 3], 1: [5, 5], 2: [18, 9]}
    """
    found, factor = {}, 2 * (max_influence or 0.0)
    for client, (examples, *numbers) in claims.items():
        found[client] = [min(number, MOST_STEPS) for number in numbers]
        for i, number in enumerate(found[client] if factor else ()):
            usual = [c[i + 1] * max(1.0, min(examples / c[0], MOST_EXAMPLES)) for c in claims.values()]
            found[client][i] = min(number, int(factor * median_low(usual)))
    return found


def claim(examples: int, figures: Mapping[str, float], *names: str) -> list[int]:
    """Return a client's number of examples, at least 1, and the figures with these names as whole numbers."""
    return [max(1, examples), *(int(max(0.0, min(figures.get(name, 0.0), 1e18))) for name in names)]


@dataclass
class Steps:
    """Steps of the schedule, as the server counts them: in each round by the client that has made most.

    Args:
        max_influence: see :func:`believed`.
        moved: of each round the steps of the optimizer and of the schedule, one number after the other.
        claims: client → examples, steps and moves that it has stated last.
        announced: client → likewise before the first round, where the module asks for its steps in all rounds.
    """

    max_influence: float | None
    moved: list[int] = field(default_factory=list)
    claims: dict[int, list[int]] = field(default_factory=dict)
    announced: dict[int, list[int]] = field(default_factory=dict)

    def end_round(self, round: int, outcomes: Sequence[ClientOutcome]) -> None:
        """Count the steps of ``round``, from 0: of the first of the valid clients that have made most."""
        valid = [each for each in outcomes if each.error is None and STEPS in each.metrics]
        stated = {each.client: claim(each.num_examples, each.metrics, STEPS, MOVES) for each in valid}
        self.claims |= stated
        known = believed(self.claims, self.max_influence)
        for client, (_, steps, moves) in stated.items():
            if known[client] != [steps, moves]:
                rank_zero_info(
                    f"Round {round + 1}: client {client} says that it has made {steps} steps, and its schedule "
                    f"{moves}, far more than others: {known[client]} are believed, all by max_influence=None"
                )
        self.moved[2 * round :] = max((known[client] for client in stated), key=itemgetter(0), default=[0, 0])

    def announce(self, messages: Mapping[int, Message]) -> None:
        """Note the steps of a round that clients announce."""
        for client, message in messages.items():
            stated = claim(message.num_examples, message.figures, "steps", "steps")
            self.announced[client] = self.claims[client] = stated

    def total(self, rounds: int, fraction: Fraction, seed: int) -> int:
        """Return the steps of the longest client of each round, in all rounds. 0 if clients have announced none."""
        known = believed(self.announced, self.max_influence)
        steps = [known[client][0] for client in sorted(known)]
        cohorts = [choose_cohort(round, len(steps), fraction, seed) for round in range(rounds if steps else 0)]
        return sum(max(steps[place] for place in cohort) for cohort in cohorts)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"moved": list(self.moved), "claims": dict(self.claims), "announced": dict(self.announced)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave. Raise FederationError for something else."""
        with raised_as(FederationError, "steps of a schedule cannot be restored", "give what state_dict() returned"):
            stated = [*state["claims"].values(), *state["announced"].values()]
            for number in (*state["moved"], *(number for _, *numbers in stated for number in numbers)):
                check_at_least("steps", number, 0)
            new = list(state["moved"]), dict(state["claims"]), dict(state["announced"])
        self.moved, self.claims, self.announced = new


Place = tuple[int, int, str]
"""An option of an optimizer: the numbers of the optimizer and of its group, and its name."""

REMEDY = """other clients cannot know. Return a scheduler from configure_optimizers that moves by itself:
{"scheduler": LambdaLR(optimizer, lambda step: ...), "interval": "step"}; or set the rate before every step"""


class ClientCourse(Course):
    """Course of a client over a network: it begins where the server says, and counts how far it moves.

    ``course`` is of the client's Trainer, which steps the schedulers ``between`` once in a round.
    """

    def __init__(self, course: Course, between: Sequence[Any]) -> None:
        self._between = {id(each) for each in between}
        moving = course.schedulers or [each for each in course.own if id(each) not in self._between]
        super().__init__(course.optimizers, moving, [each for each in course.own if each not in moving])
        self._counts: dict[int, int] = {}
        self._left: set[Place] = set()
        self._forget: Callable[[], Any] = list
        self._ended: tuple[dict[int, int], set[Place]] = {}, set()

    def replay(self, steps: int, moves: int) -> None:
        """Move as in an earlier round."""
        self._at = 0
        self.move_to(moves)
        self.done += steps

    def count(self) -> None:
        """Count the schedulers' steps from now on."""
        for each in (*self.schedulers, *self.own):
            kind = type(each)
            each.__class__ = type(kind.__name__, (kind,), {"step": self._counted(id(each), kind)})

    def _counted(self, key: int, kind: Any) -> Callable[..., Any]:
        def step(scheduler: Any, *args: Any, **options: Any) -> Any:
            self._counts[key] = self._counts.get(key, 0) + 1
            return kind.step(scheduler, *args, **options)

        return step

    def begin_client(self) -> None:
        """See :meth:`Course.begin_client`. Look at the first step which options hooks have set before it."""
        super().begin_client()
        self._counts, self._left, marked = {}, set(self._options()), dict[Place, Any]()
        for (i, j, name), value in self._options().items():  # other objects, so that an equal number is another one
            value = value + 0.0 if isinstance(value, float) else (*value,) if isinstance(value, tuple) else value
            marked[i, j, name] = self.optimizers[i].param_groups[j][name] = value

        def look(*_: Any) -> None:
            if marked:
                self._left = {place for place, value in self._options().items() if value is marked.get(place)}
            marked.clear()

        handles = [each.register_step_pre_hook(look) for each in self.optimizers]
        self._forget = lambda: [each.remove() for each in handles]

    def _options(self) -> dict[Place, Any]:
        groups = [(i, j, g) for i, each in enumerate(self.optimizers) for j, g in enumerate(each.param_groups)]
        return {(i, j, name): group[name] for i, j, group in groups for name in MOVING if name in group}

    def end_client(self, steps: int) -> None:
        """See :meth:`Course.end_client`."""
        before = self.longest
        super().end_client(steps)
        self._forget()
        if self.longest is not before:
            self._ended = dict(self._counts), self._left

    def figures(self) -> dict[str, float]:
        """Return how far the client has moved in this round, as it tells the server, after the round.

        Raise FederationError if other clients would not come there by so many steps.
        """
        counts, left = self._ended
        moves = {counts.get(id(each), 0) for each in self.schedulers}
        others = {key: count for key, count in self._counts.items() if key not in self._between}
        own = {id(each) for each in self.own}
        if len(moves) > 1 or own & counts.keys() or others != counts:
            what = "the module steps its schedules now and then, between rounds or apart"
            raise FederationError(f"{what}, which {REMEDY}")
        steps = self.longest[0]
        self._go(self.longest)
        ended = copy.deepcopy(self._options())
        self._go(self._start)
        self.move_to(number := max(moves, default=0))
        wrong = {place[2] for place in left if not is_equal(self._options()[place], ended[place])}
        if wrong:
            what = f"a hook sets {listed(sorted(wrong))} after a step"
            raise FederationError(f"{what}, and where it is after the last one {REMEDY}")
        return {STEPS: float(steps), MOVES: float(number)}


def begun(loop: Any, round: int, moved: Sequence[int]) -> TrainingContext:
    """Return the context of a client's training in ``round``, with learning rates as after the rounds before.

    ``loop`` is the client's ``FitLoop``, ``moved`` is :class:`Steps`'. Raise FederationError if that is not known.
    """
    context, between = loop.context(), [each for each in loop.trainer.lr_scheduler_configs if each.interval == "epoch"]
    for name in (type(each.scheduler).__name__ for each in between if each.reduce_on_plateau):
        remedy = "use a schedule of the round, such as StepLR"
        raise FederationError(f"{name} follows a validation metric of earlier rounds, unknown here; {remedy}")
    course = context.course or Course(context.optimizers, ())
    course = ClientCourse(course, [each.scheduler for each in between])
    if len(moved) != 2 * round:
        moved = (0, 0) * round
        if course.schedulers:
            why = "and this server does not count the steps of its rounds, as one without rounds"
            raise FederationError(
                f"{type(course.schedulers[0]).__name__} moves in every step, {why}: use interval='epoch'"
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer steps before these belong to earlier messages
        for done, counts in enumerate(zip(moved[::2], moved[1::2])):
            course.replay(*counts)
            loop.set_epoch(done)
            for each in between:
                if (done + 1) % each.frequency == 0:
                    context.module.lr_scheduler_step(each.scheduler, None)
    loop.set_epoch(round)
    course.count()
    context.steps.total.ready = context.steps.total.completed = course.done
    return replace(context, course=course if context.course else None)
