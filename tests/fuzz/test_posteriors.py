"""Broken posteriors at every place where one comes in."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_fedbayes as fb
from lightning_fedbayes import fusion, layers, modules
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.fusion import available_fusions
from tests.fuzz import assert_all_ran, many, only_own_errors
from tests.fuzz.doors import POOL, admitted, aggregate, bayesian, begun, posterior

NETWORK = bayesian()
OWN = fb.read_posterior(NETWORK)
DTYPES = (torch.complex64, torch.int64, torch.half, torch.double)
BREAKS = {
    **{str(dtype): lambda value, dtype=dtype: value.to(dtype) for dtype in DTYPES},
    **{f"{x}": lambda value, x=x: torch.full_like(value, x) for x in (torch.nan, torch.inf, 1e-45, 1e38, 0.0)},
    "nothing": lambda value: value,
    "None": lambda value: None,
    "number": lambda value: 1.0,
    "array": lambda value: value.numpy(),
    "list": lambda value: value.tolist(),
    "sparse": lambda value: value.to_sparse(),
    "meta": lambda value: value.to("meta"),
    "bools": lambda value: value > 0,
    "negative": lambda value: -value.abs() - 1,
    "with a gradient": lambda value: value.clone().requires_grad_(),
    "a parameter": lambda value: torch.nn.Parameter(value.clone()),
    "another shape": lambda value: value.unsqueeze(0),
    "empty": lambda value: value[:0] if value.ndim else torch.zeros(0),
    "scalar": lambda value: value.sum(),
    "expanded": lambda value: value[:1].expand(value.shape) if value.ndim else value,
    "transposed": lambda value: value.T.contiguous().T if value.ndim == 2 else value,
}
"""What may be wrong with one tensor."""


@st.composite
def broken(draw, sound=posterior):
    """A posterior of which a tensor, a name or a whole mapping is wrong: made so, or changed behind its back."""
    q = sound()
    parts = {"mean": dict(q.mean), "variance": dict(q.variance)}
    part = draw(st.sampled_from(["mean", "variance"]))
    name = draw(st.sampled_from(sorted(parts[part])))
    how = draw(st.sampled_from(["tensor", "tensor", "tensor", "missing", "extra", "name", "mapping", "anything"]))
    if how == "tensor":
        parts[part][name] = BREAKS[draw(st.sampled_from(sorted(BREAKS)))](parts[part][name].clone())
    elif how == "missing":
        del parts[part][name]
    elif how == "extra":
        parts[part]["extra"] = torch.zeros(2)
    elif how == "name":
        parts[part][draw(st.sampled_from([3, None, ("w",)]))] = parts[part].pop(name)
    elif how == "mapping":
        parts[part] = draw(st.sampled_from([None, [], {}, 3, "mean", np.zeros(2), torch.zeros(2)]))
    else:
        return draw(st.sampled_from(POOL))
    if draw(st.booleans()):
        try:
            return fb.GaussianPosterior(**parts)
        except FedBayesError:
            return None
    vars(q).update(parts)
    return q


PLACES = {
    **{
        f"fuse {rule}": (lambda q, rule=rule: fb.fuse(rule, [posterior(1.0), q, posterior(2.0)], previous=posterior()))
        for rule in available_fusions()
        if rule != "icov_vb"
    },
    "previous": lambda q: fb.fuse("dwc", [posterior(), posterior()], previous=q),
    "Server": lambda q: begun(posterior=q),
    "admit": lambda q: admitted(fb.ClientUpdate(0, 5, q, {"running": torch.ones(2)}, {}, 0.5)),
    "Aggregation": lambda q: aggregate(
        fusion.get_rule("conflation"), "train_size", posterior(), None, fb.ClientUpdate(0, 5, q)
    ),
    "weights": lambda q: aggregate(
        fusion.get_rule("linear_pool"), "max_discrepancy", posterior(), None, fb.ClientUpdate(0, 5, q)
    ),
    "kl": lambda q: posterior().kl(q),
    "from_state_dict": lambda q: fb.GaussianPosterior.from_state_dict(
        {"mean": getattr(q, "mean", q), "variance": getattr(q, "variance", q)}
    ),
    "UpdatePrivacy": lambda q: fb.UpdatePrivacy().send(fb.ClientUpdate(0, 5, q), posterior(), "", 0),
    "draws_from_clients": lambda q: modules.draws_from_clients([posterior(), q]),
}
OF_A_NETWORK = {
    "load_posterior": lambda q: fb.load_posterior(NETWORK, q),
    "set_prior": lambda q: layers.set_prior(NETWORK, q),
}


def passes(place, q, kind):
    with only_own_errors(kind), warnings.catch_warnings():
        warnings.simplefilter("error")
        place(q)


@given(place=st.sampled_from(sorted(PLACES)), q=broken())
@many("posteriors")
def broken_posteriors(place, q):
    passes(PLACES[place], q, "posteriors")


@given(place=st.sampled_from(sorted(OF_A_NETWORK)), q=broken(lambda: OWN.clone()))
@many("states")
def broken_posteriors_of_a_network(place, q):
    passes(OF_A_NETWORK[place], q, "states")


@pytest.mark.slow
def test_broken_posteriors_are_refused_with_errors_of_the_package():
    broken_posteriors()
    broken_posteriors_of_a_network()
    assert_all_ran("posteriors", "states")
