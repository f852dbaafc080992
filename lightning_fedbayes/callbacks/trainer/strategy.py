"""``Trainer(strategy="fedbayes", devices=N)``: the clients of a round spread over processes."""

import functools
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed.rendezvous import rendezvous

from lightning_fedbayes.core.exchange import ALONE, Collective
from lightning_fedbayes.core.quiet import environment


class ClientParallelStrategy(ParallelStrategy):
    """Every process is a whole Trainer that trains its share of a round's clients. Together they fuse.

    ::

        Trainer(strategy="fedbayes", devices=4, num_nodes=2, callbacks=[FederatedBayes(...)])

    Nothing is synchronised while clients train: processes take different numbers of steps. Between rounds all hold
    the same global posterior, so each validates on all of the validation data and sees the same figures. Only the
    first process logs and writes checkpoints. ``self.log(sync_dist=True)`` and metrics leave values as they are.

    When to use it: more than one GPU or node, or more cores than a client's step keeps busy. Collective
    operations run on the CPU (Gloo), whatever device the processes train on.

    Args:
        start_method: "popen" starts the script again for every process. "spawn" and "fork" start processes from this
            one, where there is no script (a notebook needs "fork"), and bring weights, metrics and the callbacks'
            states back to it.
        options: of Lightning: ``accelerator``, ``parallel_devices``, ``cluster_environment``, ``checkpoint_io``,
            ``precision_plugin``.
    """

    strategy_name = "fedbayes"

    def __init__(self, start_method: Literal["popen", "spawn", "fork"] = "popen", **options: Any) -> None:
        super().__init__(**options)
        self.start_method = start_method
        self.num_nodes = 1
        self.collective: Collective = ALONE

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Number of processes on this node."""
        return len(self.parallel_devices or ())

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        from lightning_fedbayes.callbacks.trainer.launcher import RememberingLauncher, SubprocessLauncher

        if self.start_method == "popen":
            self._launcher = SubprocessLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = RememberingLauncher(self, start_method=self.start_method)  # pyright: ignore

    def set_world_ranks(self) -> None:
        """Tell the cluster environment, and Lightning's ``rank_zero_only``, the rank of this process."""
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank  # pyright: ignore

    def setup_environment(self) -> None:
        """Connect to the other processes."""
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        if self.world_size > 1:
            assert self.cluster_environment is not None
            address, port = self.cluster_environment.main_address, str(self.cluster_environment.main_port)
            with environment(MASTER_ADDR=address, MASTER_PORT=port):
                self.collective = connect(self.global_rank, self.world_size)

    def setup(self, trainer: L.Trainer) -> None:
        """Let all processes start from the first one's weights."""
        assert self.model is not None
        if self.world_size > 1:
            tensors = [*self.model.parameters(), *self.model.buffers()]  # also buffers outside of the state_dict
            with torch.no_grad():
                for tensor, first in zip(tensors, self.collective.broadcast([each.detach().cpu() for each in tensors])):
                    tensor.copy_(first)
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Bring the module to this process's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return ``tensor``: the same in all processes between rounds, and not synchronised within a round."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return ``tensor``, as in one process."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return the first process's decision."""
        return self.broadcast(decision)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes."""
        self.collective.all_gather(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the value of process ``src``."""
        return self.collective.broadcast(obj, src)


@functools.cache
def connect(rank: int, size: int) -> Collective:
    """Connect the processes of this run at the address in the environment, once for all Trainers."""
    from lightning_fedbayes.core.gloo import GlooCollective

    store, _, _ = next(rendezvous("env://", rank, size))
    return GlooCollective(store, rank, size)


def collective_of(trainer: L.Trainer) -> Collective:
    """Return the processes that share the clients of a round in ``trainer``."""
    return trainer.strategy.collective if isinstance(trainer.strategy, ClientParallelStrategy) else ALONE


StrategyRegistry.register(
    ClientParallelStrategy.strategy_name, ClientParallelStrategy, description="clients spread over processes"
)
