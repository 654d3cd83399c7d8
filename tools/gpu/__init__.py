"""Parts of ``tools/gpu_check.py``: what it runs, how it runs it, and how it reports."""

from __future__ import annotations

import sys
from pathlib import Path

# Reports are made with parts of comm-core, which is the one of this source tree, installed or not.
sys.path[:0] = [str(path) for path in sorted((Path(__file__).resolve().parents[2] / "packages").glob("*/src"))]
