"""Optimizers with unusual features, as packages have them."""

from typing import Any

import torch
from torch.optim import SGD, Optimizer


class Sam(Optimizer):
    """Sharpness-aware minimization: evaluates the closure a second time, at a worse point."""

    def __init__(self, parameters: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "rho": rho})

    def step(self, closure=None):
        assert closure is not None
        with torch.enable_grad():
            loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            up = [p.grad * self.param_groups[0]["rho"] / (norm + 1e-12) for p in parameters]
            torch._foreach_add_(parameters, up)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_sub_(parameters, up)
            for p in parameters:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
        return loss


class StarLbfgs(torch.optim.LBFGS):
    """LBFGS behind ``**options``."""

    def step(self, **options):
        return super().step(options["closure"])


class Descent(Optimizer):
    """Gradient descent as a package would write it; its subclasses add something."""

    def __init__(self, parameters: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(parameters, {"lr": lr, **options})

    def before(self) -> None:
        """Add something."""

    def direction(self, p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return p.grad

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(self.direction(p, group), alpha=group["lr"])

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.before()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)
        return loss


class Sign(Descent):
    """Lion without momentum."""

    def direction(self, p, group):
        return p.grad.sign()


class Decays(Descent):
    """Decays its own learning rate in its groups."""

    def before(self):
        for group in self.param_groups:
            group["lr"] *= 0.9


class CountsItself(Descent):
    """Counts in an attribute."""

    k = 0

    def before(self):
        self.k = self.k + 1

    def direction(self, p, group):
        return p.grad / self.k


class Noise(Descent):
    """Adds noise from a generator of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.generator = torch.Generator().manual_seed(7)

    def direction(self, p, group):
        return p.grad + 0.01 * torch.randn(p.shape, generator=self.generator)


class Lookahead(Optimizer):
    """Slow weights beside those of another optimizer, as of its construction."""

    def __init__(self, optimizer: Optimizer, every: int = 2) -> None:
        self.optimizer, self.every, self.count = optimizer, every, 0
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            for slow, p in zip(self.slow, (p for group in self.param_groups for p in group["params"])):
                slow.add_(p.detach() - slow, alpha=0.5)
                p.data.copy_(slow)
        return loss


class ScheduleFree(Descent):
    """Schedule-free descent: gradients at a mean of two sequences, counted in the groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, k=0)

    def before(self):
        for group in self.param_groups:
            group["k"] += 1

    def update(self, p, group):
        z = self.state[p].setdefault("z", p.detach().clone())
        z.sub_(p.grad, alpha=group["lr"])
        p.lerp_(z, 1 / group["k"])


class NormGrowth(Descent):
    """Divides by the norm of the whole tensor, as layer-wise optimizers do."""

    def direction(self, p, group):
        return p.grad / (p.grad.norm() + 1e-3)


class Wrapper(Optimizer):
    """Delegates to an inner optimizer."""

    def __init__(self, parameters: Any) -> None:
        self.inner = SGD(parameters, lr=0.1, momentum=0.9)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)
