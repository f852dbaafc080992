"""Checkpoint files: written whole, and read only if they are."""

import pytest
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import LambdaCallback

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from tests.federations import Plain, assert_equal, federate, loader, saving, trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*exists and is not empty.*")


def run(folder, rounds, ckpt_path=None, **options):
    module, federation = Plain(), fb.FederatedBayes(fb.IIDPartition(3))
    options |= saving(folder, save_top_k=-1, filename="{epoch}")
    return module, federation, federate(module, federation, rounds, ckpt_path=ckpt_path, **options)


def truncate(path, share):
    with open(path, "r+b") as file:
        file.truncate(int(share * path.stat().st_size))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_torn_last_checkpoint_gives_way_to_the_newest_whole_one(tmp_path, share):
    whole, _, _ = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 3)
    truncate(tmp_path / "parts" / "last.ckpt", share)
    truncate(tmp_path / "parts" / "epoch=2.ckpt", 0.5)  # the newest of the others
    with pytest.warns(UserWarning, match=r"last\.ckpt is damaged .*: going on from epoch=1\.ckpt"):
        module, federation, _ = run(tmp_path / "parts", 4, "last")
    assert_equal(dict(whole.state_dict()), dict(module.state_dict()))
    assert [row["round"] for row in federation.history] == [1, 2, 3, 4]


def test_without_another_the_error_names_the_file_and_the_remedy(tmp_path):
    run(tmp_path, 2)
    for path in tmp_path.glob("*.ckpt"):
        truncate(path, 0.5)
    with pytest.raises(FederationError, match=r"last\.ckpt is damaged .*give ckpt_path= another checkpoint"):
        run(tmp_path, 3, "last")


def test_a_kill_while_the_file_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    """Lightning's own writing, cut off where it copies from another file system."""
    _, _, made = run(tmp_path, 2)
    before = (tmp_path / "last.ckpt").read_bytes()

    def torn(self, checkpoint, path, storage_options=None):
        with open(path, "wb") as file:
            file.write(before[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", torn)
    with pytest.raises(KeyboardInterrupt):
        made.save_checkpoint(tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").read_bytes() == before


def test_a_checkpoint_of_a_run_without_the_callback_is_refused(tmp_path):
    """Its open epoch would count as a round."""
    plain = trainer(2)
    plain.fit(Plain(), loader())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    made = trainer(6, [fb.FederatedBayes(fb.IIDPartition(3))])
    with pytest.raises(FederationError, match=r"run without FederatedBayes: its epochs .*load_from_checkpoint"):
        made.fit(Plain(), loader(), ckpt_path=tmp_path / "plain.ckpt")
    made.validate(Plain(), loader(shuffle=False), ckpt_path=tmp_path / "plain.ckpt", verbose=False)


def test_a_checkpoint_from_before_the_first_round_is_a_start(tmp_path):
    save = LambdaCallback(on_train_start=lambda made, _: made.save_checkpoint(tmp_path / "start.ckpt"))
    trainer(1, [save]).fit(Plain(), loader())
    whole, _, _ = run(tmp_path / "whole", 2)
    module, federation, _ = run(tmp_path / "resumed", 2, tmp_path / "start.ckpt")
    assert len(federation.history) == 2
    assert_equal(dict(whole.state_dict()), dict(module.state_dict()))
