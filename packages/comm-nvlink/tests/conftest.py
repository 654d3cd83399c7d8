"""What the tests of the all-reduce's kernels share: they take seconds to compile."""

from __future__ import annotations

import pytest

from comm_core import _cuda
from comm_core.jit.loader import Module
from comm_core.testing import allreduce_host
from comm_nvlink.allreduce import ALLREDUCE


@pytest.fixture(scope="session")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    """The module of the all-reduce, compiled for the host and loaded as every module is."""
    return allreduce_host.build(ALLREDUCE, tmp_path_factory.mktemp("all-reduce"))


@pytest.fixture
def one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch goes to one stream that runs it at once."""
    monkeypatch.setattr(_cuda, "raw_stream", lambda index: 0)
