"""FedProx: the minimiser of a client's problem, the engines, and what is refused."""

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.methods import FedProx
from tests.federations import Plain, bayesian, federate, loader, parameters

from .test_sites import EXAMPLES, FEATURES, Squares, data, fit, unlike


@pytest.mark.parametrize("strength", [0.1, 3.0])
def test_a_client_ends_at_the_minimum_of_its_proximal_problem(strength):
    r"""Least squares: :math:`(X^\top X / n + \mu I)^{-1} (X^\top y / n + \mu \theta_g)`, and the server averages."""
    module, (clients, _) = Squares("lbfgs"), unlike((30, 20, 10))
    expected = torch.zeros(FEATURES, dtype=torch.float64)
    for part in clients.datasets:
        x, y = part.tensors
        hessian = x.T @ x / len(x) + strength * torch.eye(FEATURES).double()
        expected += len(x) / EXAMPLES * torch.linalg.solve(hessian, x.T @ y / len(x) + strength)
    fit(module, 1, clients, partition=None, fusion=FedProx(strength, "weighted_average"), engine="sequential")
    torch.testing.assert_close(module.layer.weight[0].detach(), expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_the_term_is_that_of_a_module_that_adds_it_itself(options):
    class Own(Squares):
        def on_client_start(self, client) -> None:
            super().on_client_start(client)
            self.start = self.layer.weight.detach().clone()

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + 0.7 / 2 * (self.layer.weight - self.start).square().sum()

    ours, theirs, batches = Squares(), Own(), DataLoader(data(), batch_size=15)
    for module, strength in ((ours, 0.7), (theirs, 0.0)):
        partition = fb.SizesPartition((30, 30))
        method = FedProx(strength) if strength else "rklb"
        federation = fb.FederatedBayes(partition, fusion=method, local_epochs=3, engine="sequential")
        federate(module, federation, 2, batches, **options)
    torch.testing.assert_close(ours.layer.weight, theirs.layer.weight, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", [Plain, bayesian])
def test_a_strong_term_leaves_little_of_a_round_but_local_parameters_move(kind):
    moves = {}
    for strength in (0.0, 1e4):
        method = FedProx(strength) if strength else "rklb"
        module = kind(optimizer=partial(torch.optim.Adam, lr=0.05))
        before = parameters(module)
        name = next(iter(before))
        federation = fb.FederatedBayes(
            fb.IIDPartition(3),
            fusion=method,
            local_epochs=20,
            local_parameters=[name],
            engine="vectorized",
        )
        federate(module, federation, 1, loader())
        kept = federation.state_dict()["clients"][0]["local"][name]
        after = parameters(module)
        moves[strength] = max(float((after[each] - before[each]).abs().max()) for each in before if each != name)
        assert float((kept - before[name]).abs().max()) > 0.02
    assert moves[1e4] < moves[0.0] / 3


@pytest.mark.parametrize("strength", [-0.1, 0.0, float("nan")])
def test_a_term_that_cannot_be_is_refused_at_once(strength):
    with pytest.raises(FusionError, match=f"strength={strength}: give a finite number above 0"):
        FedProx(strength)
