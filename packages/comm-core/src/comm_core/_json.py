"""JSON as a type, canonical text of it, and digests: what ranks compare must be equal as text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

__all__ = ["Json", "JsonObject", "canonical", "digest"]

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
JsonObject: TypeAlias = "Mapping[str, Json]"


def canonical(value: Json) -> str:
    """Return the one text that equal values share: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Json) -> str:
    """Return a short digest of `value` for comparing across ranks."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]
