"""Train a federation and take its network out of the package: a state_dict, torch.export, ONNX.

python examples/export.py        # ONNX too, where onnxscript and onnxruntime are installed
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.modules import mlp


def main(folder: Path = Path("outputs/export")) -> dict[str, float]:
    """Return how far the logits of each copy of the network are from those of the posterior mean, by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    L.seed_everything(0, verbose=False)
    model, data = fb.HybridBayesianClassifier(mlp(64, 10), bayesian_last=2, estimator="flipout"), fb.DigitsDataModule()
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=3, callbacks=[fb.FederatedBayes(fb.IIDPartition(5))], **quiet)
    trainer.fit(model, datamodule=data)
    model.eval()
    x, _ = next(iter(data.val_dataloader()))
    mean = model.predict_mean(x)

    network = fb.mean_network(model)  # torch's own layers, at the posterior mean
    torch.save(network.state_dict(), folder / "weights.pt")
    plain = mlp(64, 10)  # built anew; on another machine from nn.Linear and nn.ReLU alone
    plain.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))

    rows = torch.export.Dim("rows", min=2)
    torch.export.save(torch.export.export(network, (x,), dynamic_shapes=[{0: rows}]), folder / "network.pt2")
    program = torch.export.load(folder / "network.pt2").module()

    distance = {"state_dict": plain(x) - mean, "torch.export": program(x) - mean}
    if find_spec("onnxscript") and find_spec("onnxruntime"):
        import onnxruntime  # pyright: ignore[reportMissingImports]

        torch.onnx.export(network, (x,), folder / "network.onnx", dynamic_shapes=[{0: rows}], verbose=False)
        session = onnxruntime.InferenceSession(folder / "network.onnx")
        outputs = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        distance["ONNX Runtime"] = torch.from_numpy(outputs[0]) - mean
    return {name: float(difference.detach().abs().max()) for name, difference in distance.items()}


if __name__ == "__main__":
    for name, distance in main().items():
        print(f"{name}: {distance:.1e} from the posterior mean")
