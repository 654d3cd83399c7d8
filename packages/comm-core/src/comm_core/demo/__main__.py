"""``python -m comm_core.demo``: exits with 0 if the results agree, 1 if not or if a rank failed, 2 on wrong usage."""

from __future__ import annotations

from comm_core.demo.command import main

if __name__ == "__main__":
    main()
