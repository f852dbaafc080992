"""Laws that a Bayesian layer must obey, measured in our layers and in those of six other libraries.

    python -m benchmarks.contract.run [--environments outputs/contract] [--libraries blitz torchbnn]

Every other library is installed at a pinned version into an environment of its own, which sees the packages of this one
after its own: torch is shared, so that all libraries are measured under one torch, and is not downloaded again. Each is
measured in a process of its own environment. Our layers are measured in this environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import site
import subprocess
import sys
import venv
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.contract.adaptors import LIBRARIES, Library
from benchmarks.contract.laws import LAWS, Verdict, examine

ROOT = Path(__file__).parents[2]


def interpreter(library: Library, folder: Path) -> str:
    """Return the Python of the library's environment, and make that first if it is not there.

    Raises:
        subprocess.CalledProcessError: the library cannot be installed; its ``stderr`` says why.
    """
    if library.requirement is None:
        return sys.executable
    home = folder / library.name
    python, installed = home / "bin" / "python", home / f"{library.requirement}, torch {torch.__version__}"
    if installed.exists():
        return str(python)
    venv.create(home, clear=True, with_pip=True)
    packages = next(home.glob("lib/python*/site-packages"))
    (packages / "shared.pth").write_text("\n".join(site.getsitepackages()))
    constraints = home / "constraints.txt"
    constraints.write_text(f"torch=={torch.__version__.partition('+')[0]}\n")
    subprocess.run(
        [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-c",
            constraints,
            *library.requirement.split(),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    installed.touch()
    return str(python)


def measure(library: Library) -> dict[str, Any]:
    """Version and verdicts of a library that this interpreter can import."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    verdicts = {name: dataclasses.asdict(examine(name, library)) for name in LAWS}
    return {"version": importlib.metadata.version(library.package), "verdicts": verdicts}


def measure_elsewhere(library: Library, folder: Path) -> dict[str, Any]:
    """Call :func:`measure` in the library's environment; ``{"reason": …}`` if it cannot be installed or run."""
    try:
        python = interpreter(library, folder)
        done = subprocess.run(
            [python, "-m", "benchmarks.contract.run", "--inside", library.name],
            check=True,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.CalledProcessError as error:
        return {"reason": (error.stderr.strip() or f"exit status {error.returncode}").splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def shown(verdict: Verdict) -> str:
    """A cell of the table."""
    if verdict.verdict == "n/a":
        return "n/a"
    figure = verdict.note.partition(":")[0] if verdict.figure is None else f"{verdict.figure:.2g}"
    return figure if verdict.verdict == "pass" else f"**fails** {figure}"


def table(results: dict[str, dict[str, Any]]) -> str:
    """A row per law, a column per library, and a last row that counts what holds of what applies."""
    from lightning_fedbayes.core.tables import markdown_table

    measured = {
        name: {law: Verdict(**each) for law, each in result["verdicts"].items()}
        for name, result in results.items()
        if "verdicts" in result
    }
    rows = [
        [law, LAWS[law].figure, *(shown(measured[name][law]) if name in measured else "" for name in results)]
        for law in LAWS
    ]
    counts = []
    for name, result in results.items():
        verdicts = [each.verdict for each in measured.get(name, {}).values()]
        counts.append(
            f"{verdicts.count('pass')} of {len(verdicts) - verdicts.count('n/a')}"
            if verdicts
            else f"not measured: {result['reason']}"
        )
    header = [f"{name} {result.get('version', '')}".strip() for name, result in results.items()]
    return markdown_table(("law", "figure", *header), [*rows, ["**holds**", "", *counts]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=ROOT / "outputs" / "contract")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--inside", choices=LIBRARIES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(measure(LIBRARIES[arguments.inside])))
        return
    results = {}
    for number, name in enumerate(arguments.libraries, 1):
        print(f"{number}/{len(arguments.libraries)} {name}", file=sys.stderr, flush=True)
        results[name] = measure_elsewhere(LIBRARIES[name], arguments.environments.absolute())
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}\n")
    print(table(results))
    print()
    for name, result in results.items():
        for law, verdict in result.get("verdicts", {}).items():
            if verdict["note"]:
                print(f"* {name}, {law}, {verdict['verdict']}: {verdict['note']}")


if __name__ == "__main__":
    main()
