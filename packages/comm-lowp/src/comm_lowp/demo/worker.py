"""The entry of a rank process: says where it is before it spends seconds on importing torch."""

from __future__ import annotations

import sys

from comm_core._json import Json
from comm_core.demo.ranks import Member

__all__ = ["main"]


def main(member: Member) -> Json:
    """Run this rank; return what it found."""
    member.tell("progress", at="importing torch")
    from comm_lowp.demo.job import run

    return run(member)


if __name__ == "__main__":
    Member.run(main, sys.argv[-1])
