"""The wrappers of torch's private names, and training without those names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lightning_fedbayes.core.private_torch import (
    PRIMITIVES,
    outside_of_vmap,
    outside_vmap,
    stack_of,
    to_client_view,
    to_stack,
    vmap_level,
)

ROOT = Path(__file__).parent.parent
CLIENTS = 4


def test_stacks_are_seen_only_at_their_own_level():
    stack = torch.randn(CLIENTS, 3)
    with vmap_level(CLIENTS) as level:
        client = to_client_view(stack, level)
        assert client.shape == (3,)
        assert stack_of(client, level) is not None
        assert stack_of(stack, level) is None
        assert stack_of(client, level + 1) is None
        with outside_vmap():
            assert stack.sum(1).shape == (CLIENTS,)
        torch.func.vmap(lambda _: pytest.fail("seen") if stack_of(client, level) is not None else _)(torch.zeros(2))
        assert torch.equal(to_stack(client * 2, level, CLIENTS), stack * 2)
        assert to_stack(torch.ones(2), level, CLIENTS).shape == (CLIENTS, 2)


def test_values_of_all_clients_are_seen_outside_of_vmap():
    stack = torch.randn(CLIENTS, 3)
    assert outside_of_vmap(stack) is stack
    with vmap_level(CLIENTS) as level:
        assert torch.equal(outside_of_vmap(to_client_view(stack, level)[1:]), stack[:, 1:])
    torch.func.vmap(lambda row: row if bool((outside_of_vmap(row) == stack).all()) else pytest.fail("other"))(stack)


def test_noise_differs_between_clients():
    with vmap_level(CLIENTS) as level:
        noise = to_stack(torch.randn(1000), level, CLIENTS)
        dropped = to_stack(F.dropout(torch.ones(1000)), level, CLIENTS)
    assert noise.corrcoef().fill_diagonal_(0).abs().max() < 0.15
    assert dropped.corrcoef().fill_diagonal_(0).abs().max() < 0.15


WITHOUT = """
import sys
import torch
torch.func.vmap(torch.sin)(torch.zeros(1))
import lightning, torch.utils.flop_counter  # with what they take from torch's private modules themselves
REMOVED
import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
assert not [name for name in sys.modules if name.startswith("lightning_fedbayes.clients.vectorized")]
from tests.federations import Plain, federate, parameters
import logging
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
ends = []
for engine in ("vectorized", "auto", "sequential"):
    module, federation = Plain(), fb.FederatedBayes(fb.IIDPartition(3), engine=engine)
    try:
        federate(module, federation, 1)
        print(federation.federation.engine.name)
        ends.append(torch.cat([p.flatten() for p in parameters(module).values()]))
    except FederationError as error:
        print(error)
assert all(torch.allclose(end, ends[-1], atol=1e-5) for end in ends)
"""

PRIVATE = {
    "primitives": ("torch._C._functorch", (*PRIMITIVES, "is_functorch_wrapped_tensor"), "vectorized\nvectorized\n"),
    "pytree": (
        "torch.utils._pytree",
        ("tree_map", "tree_leaves"),
        "engine='vectorized' cannot be used: torch lacks a private name .*tree_.*\nsequential\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PRIVATE)
def test_a_process_whose_torch_lacks_private_names_trains_all_the_same(kind):
    """The names are gone before the package is imported."""
    module, names, printed = PRIVATE[kind]
    removed = f"module = sys.modules['{module}']\nfor name in {names}: delattr(module, name)"
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT.replace("REMOVED", removed)], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(f"{printed}sequential\n", run.stdout), run.stdout
