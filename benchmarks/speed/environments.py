"""An environment of its own for every peer framework, made from the package registry and kept."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS: dict[str, str] = {"pfl": "pfl[pytorch]>=0.6,<0.7", "flower": "flwr[simulation]>=1.41,<1.43"}
"""What each peer's environment is made of."""


class NotInstalledError(Exception):
    """A peer's environment could not be made; the message is why."""


def interpreter(name: str, root: Path) -> Path:
    """The Python of a peer's environment under ``root``, which is made at the first call.

    It sees the packages of this interpreter behind its own: both sides run the same torch as long as the peer permits
    it, and there is no second one to download.

    Raises:
        NotInstalledError: pip or venv failed.
    """
    home, requirement = root / name, REQUIREMENTS[name]
    python, done = home / "bin" / "python", home / "installed"
    if done.exists() and done.read_text() == requirement + sys.version:
        return python
    shutil.rmtree(home, ignore_errors=True)
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    try:
        venv.create(home, with_pip=True)
        site_packages = next(home.glob("lib/python3*/site-packages"))
        (site_packages / "shared.pth").write_text(str(Path(torch.origin).parents[1]))
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
        result = subprocess.run(pip, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError, StopIteration) as error:
        raise NotInstalledError(f"{type(error).__name__}: {error}") from error
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalledError((errors or [f"pip ended with {result.returncode}"])[0])
    done.write_text(requirement + sys.version)
    return python
