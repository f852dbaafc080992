import pytest
import torch

from lightning_fedbayes.layers import ESTIMATORS

from .helpers import KINDS


@pytest.fixture(params=ESTIMATORS)
def estimator(request):
    return request.param


@pytest.fixture(params=sorted(KINDS))
def kind(request):
    return request.param


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
