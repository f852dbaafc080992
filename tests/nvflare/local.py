"""FLARE in one process: what controller and clients send goes through its own serialization, and no further."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.utils import fobs

from lightning_fedbayes.transport.nvflare import FusionClient, FusionController
from tests.transport.federation import PARTITION, BlobData, hybrid

Change = Callable[[FLModel], "FLModel | None"]


def carried(model: FLModel) -> FLModel:
    """Return what arrives of a model."""
    return FLModelUtils.from_shareable(fobs.loads(fobs.dumps(FLModelUtils.to_shareable(model))))


def clients(
    number: int = 4, make: Any = hybrid, data: Any = BlobData, partition: Any = PARTITION, **options: Any
) -> list[FusionClient]:
    """Return the clients of a small federation."""
    trainer = {"accelerator": "cpu"}
    return [FusionClient(make(), data(), partition=partition, trainer=trainer, **options) for _ in range(number)]


def prepared(
    answering: Iterable[Any],
    fusion: Any = "reverse_kl_barycenter",
    *,
    make: Any = hybrid,
    rounds: int = 3,
    change: dict[int, Change] | None = None,
    sent: list[FLModel] | None = None,
    **options: Any,
) -> FusionController:
    """Return the controller of a federation; ``change`` is client → what becomes of what it sends, None loses it."""
    sites = {f"site-{number + 1}": client for number, client in enumerate(answering)}
    controller = FusionController(make(), fusion, num_rounds=rounds, **{"wait_for": len(sites), **options})
    on_the_way: list[Callable[[], None]] = []

    def send(task: str, data: FLModel, targets: list[str], timeout: int, callback: Callable[[FLModel], None]) -> None:
        def arrive() -> None:
            (site,) = targets
            arrived = carried(data)
            arrived.meta["site_name"] = site
            reply: FLModel | None = carried(sites[site].answer(arrived))
            reply = change[data.meta["client"]](reply) if data.meta["client"] in (change or {}) else reply
            if reply is not None:
                reply.meta["client_name"] = site
                callback(reply)
                if sent is not None:
                    sent.append(reply)

        on_the_way.append(arrive)

    def standing() -> int:
        while on_the_way:
            on_the_way.pop()()  # the last asked is the first to answer
        return 0

    names = [SimpleNamespace(name=site) for site in reversed(sites)]
    controller.start_controller(FLContext())
    vars(controller).update(
        send_model=send, get_num_standing_tasks=standing, engine=SimpleNamespace(get_clients=lambda: names)
    )
    return controller


def run(answering: Iterable[Any], fusion: Any = "reverse_kl_barycenter", **options: Any) -> FusionController:
    """Return the controller after the rounds of a federation; see :func:`prepared`."""
    controller = prepared(answering, fusion, **options)
    controller.run()
    return controller
