"""Recorded topologies: facts in a JSON file, to replay another machine's decision on any machine.

The file is ``{"schema": 1, "ranks": [...]}`` with one `RankFacts` in JSON form a rank. It contains host names, boot
ids and UUIDs of GPUs; `dump` with ``anonymize=True`` replaces them, equal ones by equal ones.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from comm_core._json import Json
from comm_core.errors import TopologyFileError
from comm_core.topology.facts import SCHEMA, DeviceFacts, HostFacts, RankFacts

__all__ = ["anonymized", "dump", "load", "read_rank"]


def load(path: str | os.PathLike[str]) -> list[RankFacts]:
    """Read the records of a file, in the order in which they stand there.

    Raises:
        TopologyFileError: it can't be read, is not such a file, or was written by a newer version.
    """
    where = f"topology file {os.fspath(path)!r}"
    try:
        document: object = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TopologyFileError(f"{where}: {error.strerror or error}") from error
    except ValueError as error:
        raise TopologyFileError(f"{where}: expected JSON: {error}") from error
    if not isinstance(document, Mapping):
        raise TopologyFileError(
            f'{where}: expected an object {{"schema": {SCHEMA}, "ranks": [...]}}, got {type(document).__name__}'
        )
    content = cast("Mapping[str, Any]", document)
    schema = content.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise TopologyFileError(f'{where}: expected "schema": a number from 1 to {SCHEMA}, got {schema!r}')
    if schema > SCHEMA:
        raise TopologyFileError(
            f"{where}: schema {schema} is newer than {SCHEMA}, the newest that this comm-core reads: update comm-core"
        )
    ranks = content.get("ranks")
    if not isinstance(ranks, list) or not ranks:
        raise TopologyFileError(f'{where}: expected "ranks": a list with at least one record')
    found: list[RankFacts] = []
    for position, record in enumerate(cast("list[Json]", ranks)):
        try:
            found.append(RankFacts.from_json(record))
        except ValueError as error:
            raise TopologyFileError(f"{where}: record {position}: {error}") from error
    return found


def read_rank(path: str | os.PathLike[str], rank: int) -> RankFacts:
    """Return the record of `rank`, marked as recorded.

    Raises:
        TopologyFileError: as `load`, or the file has no record of that rank.
    """
    records = load(path)
    for facts in records:
        if facts.rank == rank:
            return replace(facts, recorded=True)
    raise TopologyFileError(
        f"topology file {os.fspath(path)!r}: no record of rank {rank}; it has "
        f"{len(records)} record{'' if len(records) == 1 else 's'}, of ranks "
        f"{', '.join(str(facts.rank) for facts in records)}"
    )


def dump(facts: Sequence[RankFacts], path: str | os.PathLike[str], *, anonymize: bool = False) -> None:
    """Write `facts` so that `load` reads them back to equal records.

    Args:
        facts: one record a rank.
        path: the file; an existing one is replaced.
        anonymize: replace host names, boot ids, namespaces, user ids and UUIDs, see `anonymized`.

    Raises:
        OSError: the file can't be written.
    """
    records = anonymized(facts) if anonymize else facts
    document = {"schema": SCHEMA, "ranks": [record.to_json() for record in records]}
    Path(path).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def anonymized(facts: Sequence[RankFacts]) -> list[RankFacts]:
    """Return `facts` with every host name, boot id, namespace, user id and UUID replaced.

    Equal ones stay equal, different ones different, unknown ones unknown, and a cluster UUID of zeros stays zero: a
    decision about the result is the one about `facts`. These names are replaced in free text too (notes, errors and
    what plugins have found); anything else that a plugin may have recorded is kept, as are PCI addresses, product
    names and versions.
    """
    names = _Names()
    users = {uid: number for number, uid in enumerate(dict.fromkeys(record.host.uid for record in facts))}
    hosts = [_anonymous_host(record.host, names, users) for record in facts]
    devices = [_anonymous_device(record.device, names) for record in facts]
    for record in facts:
        for uuid in record.peers:
            names.uuid(uuid)
    # Free text comes last, when every name is known.
    return [
        replace(
            record,
            host=host,
            device=device,
            peers={names.uuid(u): replace(pair, error=names.text(pair.error)) for u, pair in record.peers.items()},
            notes=tuple(names.within(note) for note in record.notes),
            error=names.text(record.error),
            plugins={key: names.json(value) for key, value in record.plugins.items()},
        )
        for record, host, device in zip(facts, hosts, devices, strict=True)
    ]


def _anonymous_host(host: HostFacts, names: _Names, users: Mapping[int | None, int]) -> HostFacts:
    return HostFacts(
        hostname=names.name("host", host.hostname),
        boot_id=names.name("boot", host.boot_id),
        pid_namespace=names.name("pid", host.pid_namespace),
        ipc_namespace=names.name("ipc", host.ipc_namespace),
        mount_namespace=names.name("mnt", host.mount_namespace),
        uid=None if host.uid is None else users[host.uid],
        network_namespace=names.name("net", host.network_namespace),
    )


def _anonymous_device(device: DeviceFacts, names: _Names) -> DeviceFacts:
    fabric = device.fabric
    if fabric is not None:
        fabric = replace(fabric, cluster_uuid=names.cluster(fabric.cluster_uuid))
    return replace(device, uuid=names.uuid(device.uuid), fabric=fabric)


class _Names:
    """Private text -> what stands for it."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._used: Counter[str] = Counter()

    def name(self, kind: str, text: str) -> str:
        if not text:
            return ""
        if text not in self._names:
            self._names[text] = f"{kind}{self._next(kind)}"
        return self._names[text]

    def uuid(self, uuid: str) -> str:
        if not uuid:
            return ""
        if uuid not in self._names:
            prefix, bare = (uuid[:4], uuid[4:]) if uuid.startswith(("GPU-", "MIG-")) else ("", uuid)
            # A message may show a UUID without its prefix, as CUDA does.
            stand_in = self._names.setdefault(bare, f"00000000-0000-0000-0000-{self._next('uuid') + 1:012x}")
            self._names[uuid] = prefix + stand_in
        return self._names[uuid]

    def cluster(self, cluster_uuid: str) -> str:
        if not cluster_uuid.strip("0"):
            return cluster_uuid
        return self._names.setdefault(cluster_uuid, f"{self._next('cluster') + 1:032x}")

    def within(self, text: str) -> str:
        """Return free text with every known name replaced, whole words only and the longest name first."""
        if not self._names:
            return text
        alternatives = "|".join(map(re.escape, sorted(self._names, key=len, reverse=True)))
        return re.sub(rf"(?<![0-9A-Za-z])(?:{alternatives})(?![0-9A-Za-z])", lambda m: self._names[m[0]], text)

    def text(self, text: str | None) -> str | None:
        return None if text is None else self.within(text)

    def json(self, value: Json) -> Json:
        if isinstance(value, str):
            return self.within(value)
        if isinstance(value, Mapping):
            return {key: self.json(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.json(item) for item in value]
        return value

    def _next(self, kind: str) -> int:
        number = self._used[kind]
        self._used[kind] += 1
        return number
