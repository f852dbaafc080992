"""Operations on stacks against vmap of the functions that they replace, gradients included."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fedbayes.clients.vectorized import operations
from lightning_fedbayes.clients.vectorized.gaussians import GaussianParameters, JointDraws
from lightning_fedbayes.core.private_torch import to_client_view, to_stack, vmap_level
from lightning_fedbayes.layers import LinearReparameterization, ScaleMixturePrior
from tests.clients.vectorized.modules import Divergence

CLIENTS = 4


def operations_for(level: int) -> operations.StackedOperations:
    """The operations of a step of a module without Gaussian parameters."""
    gaussians = GaussianParameters(nn.Module())
    return operations.StackedOperations(level, gaussians, JointDraws(gaussians, {}, {}))


def both_ways(function, *stacks: Tensor):
    """Output and gradients by ``torch.func.vmap``, and inside :class:`StackedOperations`."""
    results = []
    for stacked in (False, True):
        inputs = [s.clone().requires_grad_() if s.is_floating_point() else s for s in stacks]
        if stacked:
            with vmap_level(CLIENTS) as level, operations_for(level):
                output = to_stack(function(*(to_client_view(each, level) for each in inputs)), level, CLIENTS)
        else:
            output = torch.func.vmap(function)(*inputs)
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
        (output * weights).sum().backward()
        results.append([output.detach(), *(each.grad for each in inputs if each.is_floating_point())])
    return results


def assert_agree(function, *stacks: Tensor) -> None:
    for expected, actual in zip(*both_ways(function, *stacks), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def spy(monkeypatch, function) -> list:
    """Record for each call of ``function`` whether its stacked form applied."""
    original, applied = operations.StackedOperations.replacements[function], []

    def wrapped(*args, **kwargs):
        result = original(*args, **kwargs)
        applied.append(result is not None)
        return result

    monkeypatch.setitem(operations.StackedOperations.replacements, function, wrapped)
    return applied


@pytest.mark.parametrize("lead", [(), (3,), (3, 2), (1, 3, 2), (0,)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(lead, bias, monkeypatch):
    applied = spy(monkeypatch, F.linear)
    stacks = [torch.randn(CLIENTS, *lead, 5), torch.randn(CLIENTS, 6, 5), torch.randn(CLIENTS, 6)]
    if bias:
        assert_agree(lambda x, w, b: F.linear(x, w, b), *stacks)
    else:
        assert_agree(lambda x, w: F.linear(x, w), *stacks[:2])
    assert applied == [True]


def test_linear_with_what_clients_share(monkeypatch):
    applied = spy(monkeypatch, F.linear)
    shared = torch.randn(6, 5)
    assert_agree(lambda x: F.linear(x, shared), torch.randn(CLIENTS, 3, 5))
    assert_agree(lambda w: F.linear(shared, w), torch.randn(CLIENTS, 4, 5))
    assert_agree(lambda x, w: F.linear(x, w, shared[:, 0]), torch.randn(CLIENTS, 3, 5), torch.randn(CLIENTS, 6, 5))
    assert applied == [False] * 3


def test_linear_inside_another_transform(monkeypatch):
    applied = spy(monkeypatch, F.linear)

    def jacobian(x, w):
        return torch.func.jacrev(lambda z: F.linear(z, w).tanh())(x)

    weights = torch.randn(CLIENTS, 6, 5)
    assert_agree(jacobian, torch.randn(CLIENTS, 5), weights)
    assert_agree(lambda x, w: torch.func.vmap(lambda z: F.linear(z, w))(x), torch.randn(CLIENTS, 3, 5), weights)
    assert not any(applied)


RECURRENT = {
    "one layer": {},
    "batch first": {"batch_first": True},
    "two layers": {"num_layers": 2, "dropout": 0.0},
    "both directions": {"bidirectional": True, "num_layers": 2},
    "no bias": {"bias": False, "bidirectional": True},
    "dropout of one layer": {"dropout": 0.5},
}
KINDS = {torch.gru: nn.GRU, torch.rnn_tanh: nn.RNN, torch.rnn_relu: nn.RNN}


@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
@pytest.mark.parametrize(("options", "has_start"), list(zip(RECURRENT.values(), [False, True] * 3)), ids=RECURRENT)
@pytest.mark.parametrize("function", KINDS, ids=lambda each: each.__name__)
def test_recurrent_layers_are_those_of_torch_gradients_included(function, options, has_start, monkeypatch):
    applied = spy(monkeypatch, function)
    kind = {"nonlinearity": function.__name__[4:]} if KINDS[function] is nn.RNN else {}
    clients = [KINDS[function](3, 4, **kind, **options) for _ in range(CLIENTS)]
    names = [name for name, _ in clients[0].named_parameters()]
    weights = [torch.stack([getattr(each, name).detach() for each in clients]).requires_grad_() for name in names]
    x = torch.randn(CLIENTS, 2, 5, 3, requires_grad=True)  # two sequences of five, or five of two
    states = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    start = torch.randn(CLIENTS, states, 2 if options.get("batch_first") else 5, 4) if has_start else None

    expected = [each(x[i], None if start is None else start[i]) for i, each in enumerate(clients)]
    expected = [torch.stack(each) for each in zip(*expected)]
    with vmap_level(CLIENTS) as level, operations_for(level):
        views = [to_client_view(each, level) for each in weights]
        h = None if start is None else to_client_view(start, level)
        monkeypatch.setattr(clients[0], "_flat_weights", views)
        monkeypatch.setattr(clients[0], "_flat_weight_refs", [None] * len(views))
        outputs = [to_stack(each, level, CLIENTS) for each in clients[0](to_client_view(x, level), h)]
    assert applied == [True]
    for output, known in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, known, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(sum(each.sin().sum() for each in outputs), [x, *weights])
    own = [getattr(each, name) for name in names for each in clients]
    known = torch.autograd.grad(sum(each.sin().sum() for each in expected), [x, *own])
    stacked = [known[0], *(torch.stack(known[i : i + CLIENTS]) for i in range(1, len(known), CLIENTS))]
    for gradient, each in zip(gradients, stacked, strict=True):
        torch.testing.assert_close(gradient, each, rtol=1e-5, atol=2e-6)


def test_data_of_a_clients_tensor_is_written_into_without_gradient():
    weights = torch.ones(CLIENTS, 3, requires_grad=True)
    shared = torch.ones(3, requires_grad=True)
    with vmap_level(CLIENTS) as level, operations_for(level):
        view = to_client_view(weights, level)
        view.data.normal_()
        assert not view.data.requires_grad
        assert shared.data.data_ptr() == shared.data_ptr()
        shared.data.zero_()
    assert len(weights.detach().unique()) == 3 * CLIENTS
    assert not shared.any()


def test_cross_entropy(monkeypatch):
    applied = spy(monkeypatch, F.cross_entropy)
    logits, labels = torch.randn(CLIENTS, 7, 3), torch.randint(0, 3, (CLIENTS, 7))
    labels[1, :4] = -100
    labels[2, 0] = 1
    assert_agree(lambda z, y: F.cross_entropy(z, y), logits, labels)
    assert_agree(lambda z, y: F.cross_entropy(z, y, ignore_index=1), logits, labels.clamp_min(0))
    assert_agree(lambda z, y: nn.CrossEntropyLoss()(z, y), logits, labels)
    assert applied == [True] * 3
    applied.clear()  # and of other kinds
    logits, labels = torch.randn(CLIENTS, 7, 3), torch.randint(0, 3, (CLIENTS, 7))
    weights = torch.tensor([0.2, 1.0, 3.0])
    assert_agree(lambda z, y: F.cross_entropy(z, y, weights), logits, labels)
    assert_agree(lambda z, y: F.cross_entropy(z, y, reduction="sum"), logits, labels)
    assert_agree(lambda z, y: F.cross_entropy(z, y, reduction="none"), logits, labels)
    assert_agree(lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1), logits, labels)
    assert_agree(lambda z, p: F.cross_entropy(z, p), logits, torch.randn(CLIENTS, 7, 3).softmax(-1))
    pixels = torch.randn(CLIENTS, 7, 3, 2), torch.randint(0, 3, (CLIENTS, 7, 2))
    assert_agree(lambda z, y: F.cross_entropy(z, y), *pixels)
    assert_agree(lambda z, y: F.cross_entropy(z[0], y[0]), logits, labels)
    shared = labels[0]
    assert_agree(lambda z: F.cross_entropy(z, shared), logits)
    assert not any(applied)


def test_half_precision_keeps_its_dtype():
    logits, labels = torch.randn(CLIENTS, 7, 3, dtype=torch.bfloat16), torch.randint(0, 3, (CLIENTS, 7))
    with vmap_level(CLIENTS) as level, operations_for(level):
        views = to_client_view(logits, level)
        assert F.cross_entropy(views, to_client_view(labels, level)).dtype == torch.bfloat16


class Network(nn.Module):
    def __init__(self, *priors) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LinearReparameterization(3, 2, prior=prior) for prior in priors)


def test_a_prior_without_closed_form_draws_for_every_client():
    network = Network(ScaleMixturePrior(0.5, 1.0, 0.1))
    stacks = {f"inner.{name}": p.detach().expand(CLIENTS, *p.shape) for name, p in network.named_parameters()}
    with vmap_level(CLIENTS) as level, operations_for(level):
        views = {name: to_client_view(each, level) for name, each in stacks.items()}
        divergence = to_stack(torch.func.functional_call(Divergence(network), views, ()), level, CLIENTS)
    assert len(divergence.unique()) == CLIENTS
