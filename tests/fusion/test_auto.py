"""Names and checks of the rules that are chosen from; the choice itself is tested with a federation."""

import pytest

from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.fusion import AlphaBarycenter, AutoFusion, Krum, NormClipping, Reliability


def test_names_have_the_arguments():
    inner = "norm_clipping(then=krum(byzantine=1, keep=1), radius=2.0)"
    rules = ["rklb", AlphaBarycenter(0.25), NormClipping(Krum(1), 2.0), Reliability("krum", then="nwa")]
    assert AutoFusion(rules).names == (
        "reverse_kl_barycenter",
        "alpha_barycenter(alpha=0.25)",
        inner,
        "Reliability(by=krum(keep=1), then=weighted_average)",
    )


@pytest.mark.parametrize(
    ("candidates", "words"),
    [(["wb"], "give two or more"), (["rklb", "llp"], "names a rule twice"), (["rklb", "rklp"], "did you mean 'rklb'")],
)
def test_candidates_that_cannot_be_chosen_from_are_refused(candidates, words):
    with pytest.raises(FusionError, match=words):
        AutoFusion(candidates)
