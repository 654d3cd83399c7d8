"""Names that this project knows and the distributions that provide them.

The only place where comm-core names a plugin: error texts tell a user what to install, and a test checks that the
extras of the package say the same. comm-core never imports any of them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CODECS", "TRANSPORTS", "KnownName", "install_hint"]


@dataclass(frozen=True)
class KnownName:
    """A transport or codec name, who provides it, and which extra of comm-core installs that."""

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


def install_hint(name: str) -> str:
    """Return the sentence that tells how to get `name`, or an empty string for an unknown name."""
    known = TRANSPORTS.get(name) or CODECS.get(name)
    if known is None or known.built_in:
        return ""
    return f"install it with: pip install {known.distribution} (or comm-core[{known.extra}])"
