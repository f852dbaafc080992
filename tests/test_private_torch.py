"""Training without private names of torch or Lightning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fedbayes.core.private_torch import PRIMITIVES

ROOT = Path(__file__).parent.parent
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
    "launchers": (
        "lightning.pytorch.strategies.launchers",
        ("_MultiProcessingLauncher", "_SubprocessScriptLauncher"),
        "vectorized\nvectorized\n",
    ),
    "primitives": (
        "torch._C._functorch",
        (*PRIMITIVES, "is_functorch_wrapped_tensor"),
        "engine='vectorized' cannot be used: torch lacks a private name of vmap, .*\nsequential\n",
    ),
    "pytree": (
        "torch.utils._pytree",
        ("tree_map", "tree_leaves"),
        "engine='vectorized' cannot be used: torch lacks a private name .*tree_.*\nsequential\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PRIVATE)
def test_a_process_that_lacks_private_names_trains_all_the_same(kind):
    """The names are gone before the package is imported."""
    module, names, printed = PRIVATE[kind]
    removed = f"module = sys.modules['{module}']\nfor name in {names}: delattr(module, name)"
    command = [sys.executable, "-c", WITHOUT.replace("REMOVED", removed)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(f"{printed}sequential\n", run.stdout), run.stdout
