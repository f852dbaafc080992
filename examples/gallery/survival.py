"""Six hospitals, few patients each: how long does a patient live, and how sure are we?

    python examples/gallery/survival.py [--output DIR]

Data made on the spot: a Cox model with the same coefficients everywhere and a baseline hazard of each hospital. Look at
the concordance on new patients, of each hospital alone and of the federation (0.5 is a guess), and at the survival of
two patients of the smallest hospital: each band should hold nine tenths of the dashed truth.
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core import plots
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.metrics.functional import concordance_index


def patients(size: int, true: Tensor, scale: Tensor) -> TensorDataset:
    """Return features of patients, and whether their death was seen, with the months until it or the last visit."""
    x, last_visit = torch.randn(size, 8), 2 * scale * torch.rand(size)
    death = scale * (torch.empty(size).exponential_() / (x @ true).exp()) ** (1 / 1.5)  # Weibull's law of shape 1.5
    return TensorDataset(x, torch.stack([(death <= last_visit).float(), torch.minimum(death, last_visit)], 1))


def fit(clients: dict[str, TensorDataset], rounds: int) -> fb.CoxRegressor:
    model = fb.CoxRegressor(nn.Linear(8, 1, bias=False), 1, posterior_std=0.05, learning_rate=0.03, samples=1000)
    federation = fb.FederatedBayes(fusion="sites", local_epochs=5)
    trainer = L.Trainer(max_epochs=rounds, callbacks=[federation], barebones=True)
    trainer.fit(model, DataLoader(fb.ClientDatasets(clients), batch_size=128, shuffle=True))
    return model.eval()


@torch.no_grad()
def survival(model: fb.CoxRegressor, known: TensorDataset, x: Tensor, months: Tensor) -> Tensor:
    """Return draws of S(t), (draws, patients, months); a jump of the baseline is Gamma(1) over the hazards at risk."""
    event, time = known.tensors[1].T
    hazards = model.predict_step(torch.cat([known.tensors[0], x])).samples.exp()  # a draw is the same for all patients
    own, new = hazards.split([len(known), len(x)], 1)
    jumps = event * torch.empty_like(own).exponential_() / (own @ (time[:, None] >= time).float())
    return (-(jumps @ (time[:, None] <= months).float())[:, None] * new[:, :, None]).exp()


def main(output: Path, rounds: int = 20) -> dict[str, float]:
    L.seed_everything(0, verbose=False)
    sizes, true, scales = (25, 35, 45, 60, 80, 110), 0.4 * torch.randn(8), 12 + 24 * torch.rand(6)
    known = {f"hospital {k}": patients(size, true, scales[k]) for k, size in enumerate(sizes)}
    together, rows = fit(known, rounds), []
    new = [patients(500, true, scale).tensors for scale in scales]
    for (name, own), (x, seen) in zip(known.items(), new):
        risks = fit({name: own}, rounds).predict_step(x).log_risk, together.predict_step(x).log_risk, x @ true
        rows.append([name, len(own), *(float(concordance_index(risk.detach(), *seen.T.flip(0))) for risk in risks)])
    print(markdown_table(["", "patients", "alone", "federation", "true coefficients"], rows))
    figure, months = plots.empty_figure(10, 3.75), torch.linspace(0, 36, 100)
    left, right = figure.subplots(1, 2)
    left.plot(sizes, [row[2:4] for row in rows], "o-", label=["alone", "federation"])
    x = new[0][0][(new[0][0] @ true).argsort()[[50, 450]]]
    low, middle, high = survival(together, known["hospital 0"], x, months).quantile(torch.tensor([0.05, 0.5, 0.95]), 0)
    truth = (-((months / scales[0]) ** 1.5) * (x @ true).exp()[:, None]).exp()
    for k, label in enumerate(("low risk", "high risk")):
        right.fill_between(months, low[k], high[k], color=plots.PALETTE[k], alpha=0.25, linewidth=0, label=label)
        right.plot(months, middle[k], months, truth[k], "--", color=plots.PALETTE[k])
    left.set(xlabel="patients of the hospital", ylabel="concordance on new patients")
    right.set(xlabel="months", ylabel="survival", title="two patients of hospital 0, 90 % bands, truth dashed")
    _ = left.legend(frameon=False), right.legend(frameon=False)
    output.mkdir(parents=True, exist_ok=True)
    figure.savefig(output / "survival.png")
    return {"alone": sum(row[2] for row in rows) / 6, "federation": sum(row[3] for row in rows) / 6}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/gallery/survival"))
    with quietly():
        main(parser.parse_args().output)
