"""Eight newsrooms tag their articles, several tags each: are the probabilities of each tag those of the world?

    python examples/gallery/labels.py [--output DIR]

Made on the spot: counts of words by topics, a tag for each topic above a threshold, some tags forgotten. Each newsroom
writes of some topics more than of others. Look at the reliability of each tag before and after one temperature for all
newsrooms, and at the share of articles all of whose tags lie in their sets.
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core import plots
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.modules import mlp

TAGS = ("politics", "sport", "science", "culture", "money")
WORDS, FORGOTTEN = 60, 0.05


def newsroom(interests: torch.Tensor, words: torch.Tensor, count: int) -> TensorDataset:
    """Return word counts (count, WORDS), on a logarithmic scale, and tags (count, 5) of a newsroom's articles."""
    topics = torch.distributions.Dirichlet(interests).sample((count,))
    tags = (topics > 0.25) & (torch.rand(count, len(TAGS)) > FORGOTTEN)
    return TensorDataset(torch.poisson(80 * topics @ words).log1p(), tags.float())


def main(output: Path, rounds: int = 15) -> dict[str, float]:
    L.seed_everything(0, verbose=False)
    words = torch.distributions.Dirichlet(torch.full((WORDS,), 0.3)).sample((len(TAGS),))
    interests = {f"newsroom {k}": torch.distributions.Gamma(2.0, 2.0).sample((len(TAGS),)) + 0.1 for k in range(8)}
    parts = [{name: newsroom(own, words, count) for name, own in interests.items()} for count in (60, 60, 500)]
    train, held_out, new = map(fb.ClientDatasets, parts)
    model = fb.HybridBayesianClassifier(
        mlp(WORDS, len(TAGS), [64]), likelihood="bernoulli", learning_rate=0.01, posterior_std=0.05
    )
    trainer = L.Trainer(max_epochs=rounds, callbacks=[fb.FederatedBayes(local_epochs=2)], barebones=True)
    trainer.fit(model, DataLoader(train, batch_size=20, shuffle=True))
    found = fb.FederatedTemperature().fit_from(model.eval(), held_out).check_fitted()
    conformal = fb.FederatedConformal(level=0.9, per="example")
    conformal.fit_from(model, held_out, temperature=found)
    x, tags = (torch.cat(parts) for parts in zip(*(each.tensors for each in parts[2].values())))
    with torch.no_grad():
        logits = model.sample(x, 20)
    rows, curves = [], {}
    for name, temperature in (("as trained", 1.0), (f"temperature {found:.2f}", found)):
        probs = (logits / temperature).sigmoid().mean(0)
        two = torch.stack([1 - probs, probs], -1).flatten(0, 1)
        diagram = fb.metrics.functional.calibration_diagram(two, tags.long().flatten())
        nll = torch.nn.functional.binary_cross_entropy(probs, tags)
        each = [float((probs[:, k].mean() - tags[:, k].mean()).abs()) for k in range(len(TAGS))]
        right = ((probs > 0.5) == tags.bool()).float().mean()
        rows.append([name, float(right), float(nll), float(diagram.ece), max(each)])
        curves[name] = probs
    print(markdown_table(["", "accuracy of tags", "NLL", "ECE", "largest error of a tag's share"], rows))
    held = conformal.evaluate(model, new)
    print(f"\nSets that hold all tags of an article: {held.mean('coverage'):.3f} (wanted 0.9)")

    figure = plots.empty_figure(10, 4)
    for axes, (name, probs) in zip(figure.subplots(1, 2), curves.items()):
        for k, (tag, color) in enumerate(zip(TAGS, plots.PALETTE)):
            bins = (probs[:, k] * 8).long().clamp(max=7)
            shown = [b for b in range(8) if int((bins == b).sum()) >= 20]
            axes.plot(
                [float(probs[bins == b, k].mean()) for b in shown],
                [float(tags[bins == b, k].mean()) for b in shown],
                "o-",
                color=color,
                label=tag,
                markersize=4,
            )
        axes.plot([0, 1], [0, 1], color="gray", linewidth=0.8)
        axes.set(title=name, xlabel="probability of the tag", ylabel="share that has it")
        axes.legend(frameon=False)
    output.mkdir(parents=True, exist_ok=True)
    figure.savefig(output / "labels.png")
    return {"ece": rows[1][3], "before": rows[0][3], "coverage": held.mean("coverage"), "accuracy": rows[1][1]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/gallery/labels"))
    with quietly():
        print(main(parser.parse_args().output))
