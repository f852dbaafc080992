"""YAML files with a mistake: one line that names it, or a federation that could run."""

import copy

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lightning_fedbayes.cli.federation import FederationCLI
from tests.cli.commands import DIGITS, lightnings_warnings
from tests.fuzz import assert_all_ran, many, only_own_errors

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.floats(),
    st.text(max_size=5),
    st.just(10**30),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(0, 3), max_size=2),
    st.just({"class_path": "IIDPartition", "init_args": {"clients": 3}}),
    st.just({"class_path": "os.system"}),
)


def places(node, path=()):
    """Yield the path of every value in a file, from ``trainer``, ``model``, ``data`` and ``federation`` on."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key)
            yield from places(value, (*path, key))


with open(DIGITS) as file:
    GOOD = yaml.safe_load(file)
GOOD["trainer"] |= {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
PLACES = sorted(path for path in places(GOOD) if path[0] != "trainer" or len(path) == 2)


@given(place=st.sampled_from(PLACES), value=VALUES, key=st.one_of(st.none(), st.text(min_size=1, max_size=4)))
@many("YAML")
def any_file(folder, place, value, key):
    config = copy.deepcopy(GOOD)
    node = config
    for step in place[:-1]:
        node = node[step]
    node[place[-1] if key is None else key] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with only_own_errors("YAML"):
        FederationCLI(["--config", str(path)], run=False)


@pytest.mark.slow
@lightnings_warnings
@pytest.mark.filterwarnings("ignore")
def test_files_with_a_mistake_are_refused_with_errors_of_the_package(tmp_path):
    any_file(tmp_path)
    assert_all_ran("YAML")
