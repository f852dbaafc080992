"""Help on one page, one line for every mistake, docstrings as plain text."""

import pytest

from lightning_fedbayes.cli import main
from tests.cli.commands import DIGITS, lightnings_warnings, refusal

pytestmark = lightnings_warnings


def test_the_help_of_fit_names_every_argument_of_the_federation_and_every_class(capsys):
    main(["fit", "--help"])
    shown = capsys.readouterr().out
    for name in ("partition", "fusion", "weighting", "adversaries", "local_epochs", "safeguards.max_failed_rounds"):
        assert f"--federation.{name} " in shown
    assert "--federation.seed" not in shown  # there is one seed, seed_everything
    for name in ("HybridBayesianClassifier", "DigitsDataModule", "max_epochs", "--seed_everything"):
        assert name in shown
    assert ":class:" not in shown
    assert "``" not in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--federation.fuson=a"], "unknown option 'federation.fuson': did you mean 'federation.fusion'?"),
        (["--trainer.max_epoch=1"], "did you mean 'trainer.max_epochs'?"),
        (["--optimzer=Adam"], "did you mean 'optimizer'?"),
        (["--federation.fusion=rklbb"], "unknown fusion rule 'rklbb': did you mean 'rklb'?"),
        (["--federation.weighting=equall"], "did you mean 'equal'?"),
        (
            ["--federation.engine=vectorised"],
            "federation.engine: unknown choice 'vectorised': did you mean 'vectorized'?",
        ),
        (["--federation.seed=3"], 'must be given via "seed_everything"'),
        (["--federation.local_epochs=two"], "federation.local_epochs: Expected a <class 'int'>. Got value: two"),
        (["--federation.safeguards.min_clients=two"], "min_clients: Expected a <class 'int'>"),
        (
            ["--federation.partition=DirchletPartition"],
            "did you mean 'DirichletPartition'? Known: ClassPartition, "
            "DirichletPartition, IIDPartition, SizesPartition",
        ),
        (["--federation.partition.cliens=3"], "unknown argument 'cliens': did you mean 'clients'?"),
        (["--federation.partition.clients=0"], "clients=0: give at least 1"),
        (
            ["--federation.fusion.class_path=Reliability", "--federation.fusion.init_args.by=ivar_v"],
            "unknown fusion rule 'ivar_v': did you mean 'ivar_vb'?",
        ),
        (
            ["--model=HybridBayesianClasifier"],
            "model: unknown class 'HybridBayesianClasifier': did you mean 'HybridBayesianClassifier'?",
        ),
        (["--model.estimater=flipout"], "unknown argument 'estimater': did you mean 'estimator'?"),
        (["--model.estimator=flipot"], "model.estimator: unknown choice 'flipot': did you mean 'flipout'?"),
        (
            ["--model.network=lightning_fedbayes.modules.mpl"],
            "model.network: unknown name 'mpl': did you mean 'mlp'?",
        ),
        (["--model.network.featurs=3"], "unknown argument 'featurs': did you mean 'features'? Known: features, "),
        (["--data=DigitDataModule"], "did you mean 'DigitsDataModule'?"),
        (["--trainer.logger=WandLogger"], "did you mean 'WandbLogger'? Known: CSVLogger, "),
        (["--seed_everything=true"], "seed_everything: Expected a <class 'int'>"),
    ],
)
def test_a_mistake_in_an_option_gets_one_line_with_the_nearest(arguments, expected, capsys):
    assert expected in refusal(capsys, "fit", "--config", DIGITS, *arguments)
