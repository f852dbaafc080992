"""The package as a stranger gets it: built, installed beside nothing of this folder, and run."""

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXAMPLE = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def run(*command: object, folder: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Build the source archive, and the wheel from what is in it."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, folder=folder)
    return folder


def test_readmes_example_runs_where_only_the_wheel_is_installed(built, tmp_path):
    """The packages that it needs are those of this environment; this one's own files are not on the path."""
    (wheel,) = built.glob("*.whl")
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    files = ("README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore")
    assert tops == {"lightning_fedbayes", *files}
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (file,) = (name for name in names if name.endswith("/METADATA"))
        described = message_from_bytes(archive.read(file))
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"lightning_fedbayes"}
    assert "lightning_fedbayes/py.typed" in names
    for file, line in (("CITATION.cff", "\nversion: {}\n"), ("CHANGELOG.md", "\n## {}\n")):
        assert line.format(described["Version"]) in (ROOT / file).read_text()
    assert described["Author"] == "lightning_fedbayes contributors"
    page = str(described.get_payload())
    assert not re.findall(r"!\[", page)  # an index has none of the pictures,
    assert not [link for link in re.findall(r"\]\((.*?)\)", page) if not link.startswith("http")]  # and of the pages
    assert "FederatedBayes(" in page
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, folder=tmp_path)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path).strip())
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "example.py").write_text(EXAMPLE[1] + "\nprint(fb.__file__, fb.__version__)")
    *_, last = run(python, "example.py", folder=tmp_path).splitlines()
    assert last == f"{site / 'lightning_fedbayes' / '__init__.py'} {described['Version']}"
    said = run(python.with_name("fedbayes"), "doctor", folder=tmp_path)
    assert said.startswith(f"lightning-fedbayes {described['Version']}, ")
