"""Every argument of every public callable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lightning_fedbayes as fb
from lightning_fedbayes import data, fusion, layers, metrics, modules
from lightning_fedbayes.callbacks import calibration
from lightning_fedbayes.metrics import functional
from tests.fuzz import assert_all_ran, many, only_own_errors
from tests.fuzz.doors import DOORS, FUNCTIONS, POOL

VALUES = st.one_of(
    st.sampled_from(POOL),
    st.sampled_from(POOL),
    st.floats(),
    st.integers(-(2**70), 12),
    st.text(max_size=8),
    st.lists(st.one_of(st.floats(), st.integers(-3, 9), st.text(max_size=3)), max_size=4),
    st.dictionaries(st.text(max_size=3), st.sampled_from(POOL), max_size=3),
    st.recursive(st.none() | st.booleans(), lambda inner: st.lists(inner, max_size=3) | st.tuples(inner), max_leaves=5),
)
NO_DOORS = """
BayesianLayer Bernoulli BrierScore CalibrationBins ClassPrediction ClientReport Clients Cohort Conflation
CoordinateMedian Cox DeterminantSharpness Estimator Fused FusionAccumulator FusionRule GaussianCRPS GaussianFit
GaussianNLL GaussianParameter Gram GramRule HierarchicalFit HonestMoments InferredRule Knowledge KwonAleatoric
KwonEpistemic LearnedPosterior Likelihood LikelihoodModule LinearPool LogVarianceAverage MutualInformation
NegativeLogLikelihood Population PosteriorSource Preaggregation PredictiveEntropy Prior RegressionPrediction
ReliabilityRule RetainedCurve ReverseKLBarycenter RoundResult RuleState ServerOptimizer SplitDataModule Statistics
SumRule Sums SurvivalPrediction WassersteinBarycenter WeightedAverage WeightedConflation WeightedSum gram_of
outputs_with
"""
"""Values that the package makes, types, base classes whose subclasses are doors, and callables without arguments."""


@st.composite
def calls(draw):
    """A door with one or two arguments replaced."""
    door = draw(st.sampled_from(sorted(DOORS)))
    function, good = DOORS[door]
    names = draw(st.lists(st.sampled_from(sorted(good)), min_size=1, max_size=2, unique=True))
    bad = {name: draw(VALUES) for name in names}
    bad = {name: value for name, value in bad.items() if not (name in FUNCTIONS and callable(value))}
    return door, function, {**good, **bad}


@given(call=calls())
@many("arguments")
def bad_arguments(call):
    _, function, arguments = call
    with only_own_errors("arguments"):
        function(**arguments)


@pytest.mark.slow
def test_bad_arguments_are_refused_with_errors_of_the_package():
    bad_arguments()
    assert_all_ran("arguments")


def test_the_good_call_of_every_door_works():
    """Otherwise the fuzz would test one error message only."""
    for function, arguments in DOORS.values():
        function(**arguments)


def test_every_public_callable_is_a_door():
    """The list of doors is complete: what is left out is named, and why."""
    known = {name.partition(" ")[0].partition(".")[0] for name in DOORS} | set(NO_DOORS.split())
    for room in (fb, calibration, data, functional, fusion, layers, metrics, modules):
        left = {n: getattr(room, n) for n in getattr(room, "__all__", vars(room)) if n[0] != "_" and n not in known}
        missing = {n for n, e in left.items() if callable(e) and not (isinstance(e, type) and issubclass(e, Exception))}
        assert not {name for name in missing if not (name.startswith("Conv") and "Reparam" in name)}, room
