"""Files that need a package which is not installed are not searched for examples in docstrings."""

from importlib.util import find_spec

collect_ignore = (
    []
    if find_spec("nvflare")
    else [
        "lightning_fedbayes/transport/nvflare",
        *(f"tests/nvflare/{name}.py" for name in ("local", "simulated")),
    ]
)
