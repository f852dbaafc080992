"""A client of a federation over NVIDIA FLARE: the body of the loop of its client script."""

from pathlib import Path
from typing import Any

from nvflare.app_common.abstract.fl_model import FLModel

from lightning_fedbayes.core.errors import check_kind
from lightning_fedbayes.core.messages import Message
from lightning_fedbayes.transport.client import STAGES, RemoteClient
from lightning_fedbayes.transport.nvflare.wire import ASKED, answer_of, check_absolute, number_in, question_in


class FusionClient(RemoteClient):
    """Trains a module on the client's own data when FLARE's server asks for it.

    ::

        import nvflare.client as flare

        flare.init()
        client = FusionClient(HybridBayesianClassifier(mlp(64, 10), bayesian_last=1), OwnData("/data"), local_epochs=2)
        while flare.is_running():
            flare.send(client.answer(flare.receive()))

    Every random draw comes from the server's seed, the round and the client's number, which the server gives, so a
    federation over FLARE ends where one inside a single process ends. A client that raises is left out of the round,
    and is asked again in the next. The server says why.

    Arguments and errors are as of :class:`~lightning_fedbayes.transport.client.RemoteClient`, without ``one_shot``. A
    function that makes the data module takes the name of the site. ``fusion``, ``buffers`` and ``local_parameters`` are
    the same as the :class:`FusionController`'s, and ``state_folder`` is an absolute path.
    """

    def folder_of(self, path: Any) -> Path:
        """See :meth:`RemoteClient.folder_of`. FLARE runs a client's processes in folders of its own."""
        check_absolute("state_folder", path)
        return super().folder_of(path)

    def answer(self, model: FLModel) -> FLModel:
        """Return an update, scores, sums or a failure. Raise FederationError if ``model`` is no FLModel."""
        check_kind("model", model, FLModel, "give what flare.receive() returns")
        meta = model.meta

        def reply() -> Message:
            return self.reply(*question_in(model), meta.get("site_name"))

        return self.attempt(STAGES.get(meta.get(ASKED, ""), "reading"), number_in(meta), reply, answer_of)
