"""What several test files of comm-pcie need: its modules, compiled for the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from comm_core.jit import Module
from comm_core.testing import hosted
from comm_pcie import selftest
from comm_pcie.exchange import EXCHANGE
from comm_pcie.selftest import SELFTEST

HERE = Path(__file__).parent


class Hosted(NamedTuple):
    """The modules of a communicator over ``pcie``, by spec."""

    windows: Module
    exchange: Module
    selftest: Module


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Hosted:
    """The modules, compiled for the host once."""
    folder = lambda name: tmp_path_factory.mktemp(name)  # noqa: E731
    # Links of the test of links can be broken, and its two ends run at the same time.
    flags = ["-DHOST_ASYNC", "-DHOST_COPY=link_copy", '-DHOST_MAY_ACCESS(a,b)=(!link_fault("deny",a,b))']
    declared = folder("links") / "links.h"
    declared.write_text(
        "#include <stddef.h>\n"
        "static inline void link_copy(char*, const char*, size_t, int);\n"
        "static inline bool link_fault(const char*, int, int);\n"
    )
    return Hosted(
        hosted.windows(folder("windows")),
        hosted.build(EXCHANGE, HERE / "host_exchange.h", folder("exchange"), "-Werror"),
        hosted.build(SELFTEST, HERE / "host_selftest.h", folder("selftest"), f"-include{declared}", *flags),
    )


@pytest.fixture(autouse=True)
def _no_verdicts() -> Iterator[None]:
    """Links are tested anew in each test."""
    selftest.forget()
    yield
    selftest.forget()
