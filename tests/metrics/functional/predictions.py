"""Random predictions and targets."""

import torch


def draw(shape, seed=0, temperature=2.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (temperature * torch.randn(shape, generator=generator, dtype=dtype)).softmax(-1)


def targets(batch, classes, seed=1):
    return torch.randint(classes, (batch,), generator=torch.Generator().manual_seed(seed))
