"""Private names of other libraries stay in the files made for them."""

import re
from pathlib import Path

import pytest

import lightning_fedbayes

PACKAGE = Path(lightning_fedbayes.__file__).parent

TORCH = "core/private_torch.py"
PRIVATE = {
    "callbacks/trainer/": (
        r"\b(?:from|import) lightning[\w.]*\._\w+",
        r"\bfrom lightning[\w.]* import .*\b_[a-zA-Z]\w*",
        r"\b_current_fx_name\b",
        r"\._(?:data_source|combined_loader|results|logger_connector|first_loop_iter|detect_anomaly)\b",
        r"\._(?:batches_that_stepped|skip_next_val|on_before_batch_transfer|launcher|configure_launcher)\b",
        r"\b(?:callback|timer|checkpoint)\._[a-z]\w*",
        r"\b(?:trainer|loop|fit_loop|epoch_loop|connector)\._[a-z]\w*",
        r"\b(?:fit_loop|epoch_loop|automatic_optimization|optim_progress|val_loop|epoch_progress)\b",
    ),
    TORCH: (
        r"\btorch(?:\.\w+)*\._[a-zA-Z]\w*",  # torch._C, torch.utils._pytree
        r"\bfrom torch[\w.]* import .*\b_[a-zA-Z]\w*",
        r"\._version\b",
        r"\._(?:forward|backward)(?:_pre)?_hooks\b",
        r"\b_post_accumulate_grad_hooks\b",
        r"\._optimizer_step_(?:pre|post)_hooks\b",
    ),
}
"""File or folder → patterns of names that may stand nowhere else: Lightning's, with the loops inside its fit loop, and
torch's. ``_parameters``, ``_buffers``, ``_modules`` and ``_apply`` of an ``nn.Module`` may stand anywhere: torch's own
documentation builds on them."""


@pytest.mark.parametrize("home", PRIVATE)
def test_private_names_stand_in_their_own_file(home):
    found = {
        path.relative_to(PACKAGE).as_posix(): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.relative_to(PACKAGE).as_posix().startswith(home)
        and (names := [each for pattern in PRIVATE[home] for each in re.findall(pattern, path.read_text())])
    }
    assert not found
