"""Random bad input at every public door: an error of the package, or none, and never a hang."""

import os
import signal
from collections import Counter
from contextlib import contextmanager

from hypothesis import HealthCheck, settings

from lightning_fedbayes.core.errors import FedBayesError

TIMES = int(os.environ.get("FUZZ_TIMES", "1"))
"""``FUZZ_TIMES=6 pytest tests/fuzz`` makes six times as many calls: 20,000 of public callables alone."""
EXAMPLES = {
    "arguments": 3600,
    "posteriors": 800,
    "data sets": 300,
    "labels": 200,
    "wire": 300,
    "states": 150,
    "strategies": 200,
    "YAML": 40,
}
"""Number of examples of each kind."""
RAN = Counter()
"""Number of examples of each kind that have been tried."""
SECONDS = 20
"""An example that takes longer hangs: the longest good call takes less than one."""


def many(kind):
    """Settings of ``EXAMPLES[kind]`` examples, the same in every run."""
    unhurried = {"deadline": None, "suppress_health_check": list(HealthCheck)}
    return settings(max_examples=TIMES * EXAMPLES[kind], derandomize=True, database=None, **unhurried)


def assert_all_ran(*kinds):
    assert all(RAN[kind] >= EXAMPLES[kind] for kind in kinds), RAN


@contextmanager
def only_own_errors(kind):
    """Count an example; let an error of the package pass; anything else, a time-out among it, fails the test."""
    RAN[kind] += 1

    def stop(*_):
        raise TimeoutError(f"no answer within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    except FedBayesError:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
