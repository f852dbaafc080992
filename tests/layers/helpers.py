"""Layers of every kind, and draws from them."""

import torch
from torch.func import functional_call, stack_module_state, vmap

from lightning_fedbayes import layers

# (name of the deterministic layer, constructor arguments, input of two examples)
KINDS = {
    "Linear": ((3, 2), {}, (2, 3)),
    "Conv1d": ((2, 4, 3), {"padding": 1, "groups": 2}, (2, 2, 5)),
    "Conv2d": (
        (2, 3, (3, 2)),
        {"stride": 2, "dilation": (1, 2), "padding_mode": "circular", "padding": 1},
        (2, 2, 5, 6),
    ),
    "Conv3d": ((1, 2, 3), {"padding": "same"}, (2, 1, 3, 3, 3)),
    "ConvTranspose1d": ((2, 3, 3), {"stride": 2, "output_padding": 1}, (2, 2, 3)),
    "ConvTranspose2d": ((2, 2, 3), {"stride": 2, "groups": 2, "padding": 1}, (2, 2, 3, 3)),
    "ConvTranspose3d": ((1, 2, 2), {"dilation": 2}, (2, 1, 2, 2, 2)),
}


def make(kind, estimator="reparameterization", **extra):
    positional, keywords, _ = KINDS[kind]
    suffix = "".join(word.capitalize() for word in estimator.split("_"))
    return getattr(layers, kind + suffix)(*positional, **keywords, **extra)


def example(kind):
    return torch.randn(KINDS[kind][2])


def draws(function, count):
    """``count`` independent calls of ``function`` in one, shape (count, ...)."""
    with torch.no_grad():
        return torch.func.vmap(lambda _: function(), randomness="different")(torch.empty(count))


def covariance(samples):
    """Covariance of flattened Gaussian samples, and at least four of its standard errors."""
    flat = samples.flatten(1).double()
    flat = flat - flat.mean(0)
    estimate = flat.T @ flat / len(flat)
    spread = estimate.diagonal().sqrt()
    return estimate, 6 * torch.outer(spread, spread) / len(flat) ** 0.5 + 1e-12


def assert_stacked_as_alone(template, clients, x):
    """In a stack clients have their own means; the first two are equal, and their outputs differ by their noise."""
    parameters, _ = stack_module_state(clients)
    outputs = vmap(lambda p: functional_call(template, p, (x,)), randomness="different")(parameters)
    assert not torch.allclose(outputs[0], outputs[1])
    with layers.mean_only(template):
        outputs = vmap(lambda p: functional_call(template, p, (x,)))(parameters)
    for client, output in zip(clients, outputs):
        with layers.mean_only(client):
            torch.testing.assert_close(output, client(x), rtol=1e-4, atol=1e-4)
