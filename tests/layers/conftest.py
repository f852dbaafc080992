import pytest

from lightning_fedbayes.layers import ESTIMATORS

from .helpers import KINDS


@pytest.fixture(params=ESTIMATORS)
def estimator(request):
    return request.param


@pytest.fixture(params=sorted(KINDS))
def kind(request):
    return request.param
