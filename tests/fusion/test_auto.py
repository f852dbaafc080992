"""Names and checks of the rules that are chosen from; the choice itself is tested with a federation."""

from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.fusion import AlphaBarycenter, AutoFusion, Krum, NormClipping, Reliability
from tests.refusals import refusals


def test_names_have_the_arguments():
    inner = "norm_clipping(then=krum(byzantine=1, keep=1), radius=2.0)"
    rules = ["rklb", AlphaBarycenter(0.25), NormClipping(Krum(1), 2.0), Reliability("krum", then="nwa")]
    assert AutoFusion(rules).names == (
        "reverse_kl_barycenter",
        "alpha_barycenter(alpha=0.25)",
        inner,
        "Reliability(by=krum(keep=1), then=weighted_average)",
    )


test_candidates_that_cannot_be_chosen_from_are_refused = refusals(
    FusionError,
    (["wb"], "give two or more"),
    (["rklb", "llp"], "names a rule twice"),
    (["rklb", "rklp"], "did you mean 'rklb'"),
    call=AutoFusion,
)
