"""The example of four hospitals: encoding, missing values, splits of files made on the spot, and its table."""

import random
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.data import clients_of
from lightning_fedbayes.modules import mlp
from tests.test_examples import EXAMPLES, load

sys.path.insert(0, str(EXAMPLES))
import heart_disease as source
from heart_disease import COLUMNS, HOSPITALS, INDICATORS, HospitalsDataModule, encode, indicators, read_patients

SIZES = {"cleveland": 30, "hungarian": 24, "switzerland": 13, "va": 20}
PATIENT = "63,1,4,145,233,1,2,150,0,2.3,3,0,6,2"


def patient(draw, hospital, number):
    """A line of a file; illness goes with age and chest pain, and two attributes are missing where a hospital says."""
    ill = number % 3 == 0 if hospital != "switzerland" else number < 11
    values = [
        draw.gauss(62 if ill else 48, 5),
        draw.choice([0, 1]),
        4 if ill else draw.choice([1, 2, 3]),
        draw.randint(100, 180),
        0 if hospital == "switzerland" else draw.randint(150, 350),
        draw.choice([0, 1]),
        draw.choice([0, 1, 2]),
        draw.randint(90, 190),
        int(ill),
        draw.gauss(1, 1),
        draw.choice([1, 2, 3]),
        draw.choice([0, 1, 2, 3]) if hospital == "cleveland" else "?",
        draw.choice([3, 6, 7, "?"]),
        draw.choice([1, 2, 3, 4]) if ill else 0,
    ]
    return ",".join(map(str, values))


@pytest.fixture
def folder(tmp_path):
    draw = random.Random(0)
    for hospital, size in SIZES.items():
        lines = [patient(draw, hospital, number) for number in range(size)]
        (tmp_path / f"processed.{hospital}.data").write_text("\n".join(lines) + "\n")
    return tmp_path


def ready(folder, **options):
    module = HospitalsDataModule(folder, **options)
    module.setup("fit")
    return module


def read(tmp_path, *lines):
    path = tmp_path / "processed.va.data"
    path.write_text("\n".join(lines) + "\n")
    return read_patients(path)


def test_every_attribute_becomes_what_its_name_says(tmp_path):
    attributes, labels = read(
        tmp_path, PATIENT, "51,0,1,?,0,?,?,-9,?,-1.5,?,?,?,0", "51,0,1,0,1,-9,0,9,-9.0,-9,1,3,3,1"
    )
    assert labels.tolist() == [1, 0, 1]
    rows = [dict(zip(COLUMNS, row)) for row in encode(attributes).tolist()]
    assert rows[0] == {
        "age": 63,
        "sex": 1,
        "cp=1": 0,
        "cp=2": 0,
        "cp=3": 0,
        "cp=4": 1,
        "trestbps": 145,
        "chol": 233,
        "fbs": 1,
        "restecg=0": 0,
        "restecg=1": 0,
        "restecg=2": 1,
        "thalach": 150,
        "exang": 0,
        "oldpeak": 2.3,
        "slope=1": 0,
        "slope=2": 0,
        "slope=3": 1,
        "ca": 0,
        "thal=3": 0,
        "thal=6": 1,
        "thal=7": 0,
    }
    there = [{name: value for name, value in row.items() if value == value} for row in rows]
    assert there[1] == {"age": 51, "sex": 0, "cp=1": 1, "cp=2": 0, "cp=3": 0, "cp=4": 0, "oldpeak": -1.5}
    missing = [[name for name, flag in zip(INDICATORS, row) if flag] for row in indicators(attributes).tolist()]
    assert missing[0] == []
    assert missing[1] == [name for name in INDICATORS if name != "oldpeak missing"]
    assert missing[2] == ["trestbps missing", "fbs missing", "exang missing", "oldpeak missing"]


def test_inputs_are_standardised_over_the_training_patients_of_all_hospitals(folder):
    data = ready(folder)
    assert tuple(data.train_sets) == tuple(data.test_sets) == data.train.names == HOSPITALS
    everything = [torch.cat([part.tensors[0] for part in sets.values()]) for sets in (data.train_sets, data.test_sets)]
    train, test = (inputs[:, : len(COLUMNS)] for inputs in everything)
    flags = everything[0][:, len(COLUMNS) :]
    assert everything[0].dtype == torch.float32
    assert everything[0].shape == (len(data.train), data.num_features)
    assert test.isfinite().all()
    assert set(flags.unique().tolist()) == {0.0, 1.0}
    assert train.mean(0).abs().max() < 1e-6
    of_attribute = {name.removesuffix(" missing"): flag.bool() for name, flag in zip(INDICATORS, flags.T)}
    for name, column in zip(COLUMNS, train.T):
        missing = of_attribute.get(name.split("=")[0], torch.zeros(len(train), dtype=torch.bool))
        assert (column[missing] == 0).all(), name
        assert column[~missing].square().mean() == pytest.approx(1, abs=1e-5), name
    assert of_attribute["chol"][-len(data.train_sets["va"]) - 5 : -len(data.train_sets["va"])].all()


def test_an_imputed_value_is_the_mean_of_those_that_are_there(folder):
    """Vessels are counted in Cleveland only: elsewhere the input is 0, Cleveland's mean, and the indicator 1."""
    data = ready(folder)
    ca = COLUMNS.index("ca")
    counted = data.train_sets["cleveland"].tensors[0][:, ca]
    assert counted.mean().abs() < 1e-6
    assert counted.square().mean() == pytest.approx(1, abs=1e-5)
    for name in HOSPITALS[1:]:
        assert (data.train_sets[name].tensors[0][:, ca] == 0).all()
        assert (data.test_sets[name].tensors[0][:, len(COLUMNS) + INDICATORS.index("ca missing")] == 1).all()


def test_the_hospitals_are_the_clients(folder):
    data = ready(folder, batch_size=4)
    clients = clients_of(data.train_dataloader().dataset, None, seed=0)
    assert clients.names == HOSPITALS
    assert clients.counts.sum(1).tolist() == [len(part) for part in data.train_sets.values()]
    for name, size in SIZES.items():
        assert len(data.train_sets[name]) + len(data.test_sets[name]) == size
    assert len(next(iter(data.train_dataloader()))[1]) == 4
    expected = torch.cat([part.tensors[1] for part in data.test_sets.values()])
    for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        assert torch.equal(torch.cat([y for _, y in loader]), expected)
    assert all(isinstance(part, TensorDataset) for part in data.train_sets.values())


def test_a_federation_learns_and_its_checkpoint_is_plain(folder, tmp_path):
    L.seed_everything(0, verbose=False)
    data = HospitalsDataModule(folder)
    trainer = L.Trainer(
        max_epochs=10,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[fb.FederatedBayes(local_epochs=2)],
    )
    model = fb.HybridBayesianClassifier(
        mlp(data.num_features, data.num_classes, (8,)), bayesian_last=1, learning_rate=0.02
    )
    trainer.fit(model, datamodule=data)
    assert trainer.callback_metrics["val/accuracy"] > 0.8
    trainer.save_checkpoint(tmp_path / "federation.ckpt")
    assert "datamodule_hyper_parameters" in torch.load(tmp_path / "federation.ckpt", weights_only=True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("63,1,5,145,233,1,2,150,0,2.3,3,0,6,2", "cp has values other than"),
        ("?,1,4,145,233,1,2,150,0,2.3,3,0,6,2", "age is missing"),
        ("63,1,4,145,233,1,2,150,0,2.3,3,0,6,-9", "num is missing"),
        ("63,1,4,145,233,1,2,150,0", "columns"),
    ],
)
def test_malformed_lines(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, PATIENT, "", line)


def test_missing_and_small_hospitals(folder):
    (folder / "processed.va.data").write_text(PATIENT + "\n" + PATIENT + "\n")
    with pytest.raises(ValueError, match=r"va has 2 patients: test_fraction=0.2 leaves none to test with"):
        ready(folder)
    (folder / "processed.hungarian.data").unlink()
    with pytest.raises(FileNotFoundError, match=r"the patients of hungarian are missing: there is no file .*hungarian"):
        HospitalsDataModule(folder)


def test_missing_files_and_no_others_are_downloaded(folder, monkeypatch):
    missing = folder / "processed.va.data"
    content, asked = missing.read_bytes(), []
    missing.unlink()

    def download(address, path, progress):
        asked.append(address)
        Path(path).write_bytes(content)

    monkeypatch.setattr(source, "download_url_to_file", download)
    data = HospitalsDataModule(folder, download=True)
    assert not asked
    data.prepare_data()
    data.setup()
    assert asked == [f"{source.SOURCE}/processed.va.data"]


def test_the_example_says_at_once_where_the_data_are(example, tmp_path, monkeypatch, capsys):
    options = ["--data", str(tmp_path / "none"), "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["hospitals.py", *options])
    with pytest.raises(SystemExit):
        example.main()
    assert f"get them from {source.SOURCE}, or pass --download" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def example():
    """The script, imported."""
    return load("hospitals")


def test_the_example_compares_the_methods(example, folder, tmp_path, monkeypatch, capsys):
    output = tmp_path / "output"
    monkeypatch.setattr(
        sys, "argv", ["hospitals.py", "--data", str(folder), "--seeds", "2", "--rounds", "1", "--output", str(output)]
    )
    threads = torch.get_num_threads()
    example.main()
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert (output / "hospitals.png").stat().st_size > 10_000
    assert (output / "table.md").read_text().strip() in printed
    for score in example.SCORES:
        for method in example.METHODS:
            assert f"| {score} | {method} | " in printed
    assert "nan" not in printed


def test_the_example_guesses_the_share_of_ill_patients(example, folder):
    """Its baseline knows the hospital only: the NLL is the cross entropy of the two shares."""
    data = ready(folder)
    accuracy, nll, _ = example.score(example.predictions(data, "guess", rounds=0, seed=0), data)
    for k, name in enumerate(HOSPITALS):
        p, q = (sets[name].tensors[1].double().mean() for sets in (data.train_sets, data.test_sets))
        assert nll[k] == pytest.approx(-(q * p.log() + (1 - q) * (1 - p).log()).item(), rel=1e-5)
        assert accuracy[k] == pytest.approx(max(q, 1 - q).item())
