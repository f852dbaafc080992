"""Our side of a comparison: a split that other code has dealt reaches the clients, and settings see no test data."""

from argparse import Namespace

import numpy as np
import pytest

from benchmarks.posterior import peers


@pytest.fixture
def dealt(tmp_path):
    """Forty examples of two classes at three clients, and the file that holds them."""
    rng = np.random.default_rng(0)
    labels, client = np.arange(40) % 2, np.repeat([2, 0, 5], [25, 10, 5])
    inputs = (255 * rng.random((40, 6)) * (0.1 + labels[:, None])).astype(np.float32)
    file = tmp_path / "split.npz"
    np.savez(file, inputs=inputs, labels=labels, client=client, test_inputs=inputs[:8], test_labels=labels[:8])
    return str(file), inputs, client


def test_every_example_is_at_the_client_that_it_was_dealt_to(dealt):
    file, inputs, client = dealt
    clients, test = peers.load(file, validate=False)
    assert list(clients) == ["0", "2", "5"]
    for number, own in clients.items():
        assert np.allclose(own.tensors[0], inputs[client == int(number)] / inputs.max())
    assert np.allclose(test.tensors[0], inputs[:8] / inputs.max())


def test_settings_are_chosen_on_a_fifth_of_every_clients_training_examples(dealt):
    file, inputs, _ = dealt
    clients, held = peers.load(file, validate=True)
    assert [len(own) for own in clients.values()] == [8, 20, 4]
    seen = np.concatenate([*(own.tensors[0] for own in clients.values()), held.tensors[0]]) * inputs.max()
    assert sorted(map(tuple, seen.round())) == sorted(map(tuple, inputs.round()))


def test_a_federation_is_scored(dealt):
    options = Namespace(
        split=dealt[0],
        validate=False,
        rule="sites",
        rounds=1,
        local_epochs=1,
        batch=8,
        rate=0.01,
        kl_weight=0.1,
        seed=0,
    )
    scores = peers.run(options)
    assert 0 <= scores["accuracy"] <= 1
    assert scores["nll"] > 0
