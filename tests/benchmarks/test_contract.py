"""Our layers obey every law of the contract, and a layer that breaks every law fails every one."""

import pytest
import torch

from benchmarks.contract.adaptors import LIBRARIES
from benchmarks.contract.laws import LAWS, examine

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread():
    """Thousands of tiny calls are far slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("law", LAWS)
def test_our_layers_obey(law):
    verdict = examine(law, LIBRARIES["lightning-fedbayes"])
    assert verdict.verdict == "pass", verdict
