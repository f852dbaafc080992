"""The example over Flower's own processes."""

import pytest

from tests.flower.hardening import restart

pytestmark = pytest.mark.slow


def test_a_deployment_ends_at_the_posterior_of_a_single_process():
    """TLS, authenticated nodes, a process per message, and a server that is killed on the way."""
    restart()
