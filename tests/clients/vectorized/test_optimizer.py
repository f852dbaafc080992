"""The user's optimizer on a stack, and gradient clipping, against each client alone."""

import torch
from torch import nn

from lightning_fedbayes.clients.vectorized.optimizer import StackedOptimizer, clip_norms, clip_values
from lightning_fedbayes.clients.vectorized.probe import check_elementwise


def test_clipping_is_that_of_each_client_alone():
    torch.manual_seed(0)
    gradients = [torch.randn(4, 3, 2), torch.randn(4), 10 * torch.randn(4, 5)]
    gradients[0][2], gradients[1][2], gradients[2][2] = 0.01, 0.0, 0.02  # below the limit
    for clip, reference in ((clip_norms, nn.utils.clip_grad_norm_), (clip_values, nn.utils.clip_grad_value_)):
        clipped = [gradient.clone() for gradient in gradients]
        clip(clipped, 0.5)
        for slot in range(4):
            alone = [nn.Parameter(torch.zeros_like(gradient[slot])) for gradient in gradients]
            for parameter, gradient in zip(alone, gradients):
                parameter.grad = gradient[slot].clone()
            reference(alone, 0.5)
            for parameter, stacked in zip(alone, clipped):
                torch.testing.assert_close(stacked[slot], parameter.grad, rtol=1e-6, atol=1e-8)


def test_groups_that_step_apart_keep_their_own_number_of_steps():
    """Adam on four clients, of which two step apart at one point, against Adam on each."""
    torch.manual_seed(0)
    start, gradients = torch.randn(3), torch.randn(5, 4, 3)
    own = nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([own], lr=0.1)
    keys = check_elementwise(optimizer)
    rows = torch.stack([start] * 4)
    stacked = StackedOptimizer(optimizer, [rows], [{}] * 4, keys)
    whole = range(4)
    for step in range(5):
        groups = [whole] if step in (0, 1, 4) else [(0, 2), (1, 3)]
        for slots in groups:
            stacked.select(slots, step, alone=len(groups) == 1)
            stacked.parameters[0].grad = gradients[step][list(slots)]
            stacked.step()
    stacked.write_back()
    for slot in range(4):
        alone = nn.Parameter(start.clone())
        adam = torch.optim.Adam([alone], lr=0.1)
        for step in range(5):
            alone.grad = gradients[step, slot]
            adam.step()
        torch.testing.assert_close(rows[slot], alone.detach())
    kept = [stacked.read_state(slot) for slot in (0, 1)]
    assert [float(state[0]["step"]) for state in kept] == [5.0, 5.0]
    stacked.remove()
    assert optimizer.param_groups[0]["params"] == [own]
