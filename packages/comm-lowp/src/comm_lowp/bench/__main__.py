"""``python -m comm_lowp.bench``: the same as ``commctl bench lowp``."""

from __future__ import annotations

from comm_lowp.bench.command import app

if __name__ == "__main__":
    app()
