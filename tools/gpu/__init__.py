"""Parts of ``tools/gpu_check.py``: what it runs, how it runs it, and how it reports."""
