"""A program that behaves like nvcc for the JIT, in milliseconds: it counts what it is asked to make, and makes none.

Its "libraries" can't be loaded; everything before loading can be tried with it, on any machine: who compiles, how
often, for whom, and what becomes of each way to fail.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FakeNvcc"]

_SCRIPT = """#!/bin/sh
here={here}
case "$1" in
--version)
    echo "nvcc: NVIDIA (R) Cuda compiler driver"
    echo "Cuda compilation tools, release {release}, V{version}"
    exit 0 ;;
--dryrun)
    echo '#$ TOP={here}/toolkit/bin/..'
    echo "#$ PATH=$PATH"
    echo '#$ "{host}" -m64 -shared -o "comm.so"'
    exit 0 ;;
esac
kind=link
while [ $# -gt 0 ]; do
    case "$1" in
    -c) kind=compile ;;
    -o) out=$2 ;;
    esac
    shift
done
# One write of one short line: appended whole, whoever else writes.
echo "$kind $(basename "$(pwd)")/$out" >> "$here/calls"
if [ -f "$here/$kind.fail" ]; then . "$here/$kind.fail"; fi
if [ -f "$here/seconds" ]; then sleep "$(cat "$here/seconds")"; fi
echo "made by {version}" > "$out"
"""


@dataclass(frozen=True)
class FakeNvcc:
    """Writes the program into `folder`.

    Attributes:
        folder: its own; it may have spaces in its name.
        version: that it claims to be.
        host: the host compiler that it claims to use; None is one that comes with it.
    """

    folder: Path
    version: str = "13.0.88"
    host: str | None = None

    def __post_init__(self) -> None:
        (self.folder / "bin").mkdir(parents=True, exist_ok=True)
        text = _SCRIPT.format(
            here=shlex.quote(str(self.folder)),
            version=self.version,
            release=".".join(self.version.split(".")[:2]),
            host=self.host or self.folder / "bin" / "host-g++",
        )
        _write_program(self.path, text)
        _write_program(self.folder / "bin" / "host-g++", "#!/bin/sh\necho 'g++ (fake) 12.2.0'\n")

    @property
    def path(self) -> Path:
        """Path of the program."""
        return self.folder / "bin" / "nvcc"

    def calls(self, kind: str = "link") -> list[str]:
        """Return what it was asked to make, in order: ``"<build folder>/<file>"``."""
        try:
            lines = (self.folder / "calls").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [line.split(" ", 1)[1] for line in lines if line.startswith(f"{kind} ")]

    def made(self) -> list[str]:
        """Return the module of each library that it was asked to link, in order."""
        return [os.path.basename(call).removesuffix(".so") for call in self.calls()]  # noqa: PTH119 - no path of ours

    def take(self, seconds: float) -> None:
        """Let every command take that long from now on."""
        (self.folder / "seconds").write_text(f"{seconds}", encoding="utf-8")

    def fail(self, script: str | None, kind: str = "compile") -> None:
        """Run a shell script before a command of `kind` from now on (``"echo …; exit 2"``); None ends that."""
        path = self.folder / f"{kind}.fail"
        if script is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(script, encoding="utf-8")


def _write_program(path: Path, text: str) -> None:
    # Under another name first: a program that is being written can't be run.
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(0o755)
    fresh.replace(path)
