"""Test modules of this folder import each other by plain name (model_zoo, op_cases, ...)."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch._export import utils as export_utils

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def _own_tuning_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What was measured on this machine must not decide a test."""
    os.environ["TOPO_OPT_TUNING_CACHE"] = str(tmp_path_factory.mktemp("tuning"))


@pytest.fixture(autouse=True, scope="session")
def _composite_ops_once() -> None:
    """Decomposing a program makes torch go through all of its composite ops once for each of 27 namespaces: a quarter of what
    lowering a small program takes. Here it does so again only where the dispatcher has got other ones."""
    materialize = export_utils._materialize_cpp_cia_ops
    known: list[str] = []

    def only_new() -> None:
        ops = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if ops != known:
            materialize()
            known[:] = ops

    export_utils._materialize_cpp_cia_ops = only_new


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="models in one dtype only")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thorough: left out with --quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        for item in items:
            if "thorough" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="--quick"))
