"""Names that this project knows and the distributions that provide them.

The only place where comm-core names a plugin: error texts tell a user what to install, and a test checks that the
extras of the package say the same. comm-core never imports any of them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALLREDUCE", "CODECS", "TRANSPORTS", "KnownName", "install_hint", "provider"]


@dataclass(frozen=True)
class KnownName:
    """A transport, codec or all-reduce backend, who provides it, and which extra of comm-core installs that."""

    name: str
    distribution: str
    extra: str | None

    @property
    def built_in(self) -> bool:
        """Whether comm-core itself provides the name."""
        return self.distribution == "comm-core"


TRANSPORTS: dict[str, KnownName] = {
    known.name: known
    for known in (
        KnownName("nvlink", "comm-nvlink", "nvlink"),
        KnownName("pcie", "comm-pcie", "pcie"),
        KnownName("mnnvl", "comm-mnnvl", "mnnvl"),
        KnownName("windows", "comm-core", None),
        KnownName("windows-ce", "comm-core", None),
        KnownName("nccl", "comm-core", None),
        KnownName("gloo", "comm-core", None),
    )
}
"""Transport name -> provider."""

CODECS: dict[str, KnownName] = {"sage2": KnownName("sage2", "comm-lowp", "lowp")}
"""Codec name -> provider."""

ALLREDUCE: dict[str, KnownName] = {
    known.name: known
    for known in (
        KnownName("trtllm", "comm-nvlink", "nvlink"),
        KnownName("mnnvl", "comm-mnnvl", "mnnvl"),
        KnownName("dist", "comm-core", None),
    )
}
"""All-reduce backend -> provider. A name that is a transport as well has one provider for both."""


def provider(name: str) -> KnownName | None:
    """Return who provides `name`, whatever it is the name of, or None for an unknown name."""
    return TRANSPORTS.get(name) or CODECS.get(name) or ALLREDUCE.get(name)


def install_hint(name: str) -> str:
    """Return the sentence that tells how to get `name`, or an empty string for an unknown name."""
    known = provider(name)
    if known is None or known.built_in:
        return ""
    return f"install it with: pip install {known.distribution} (or comm-core[{known.extra}])"
