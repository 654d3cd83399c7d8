"""Benchmarks of the encoding: what ``commctl bench lowp`` and ``python -m comm_lowp.bench`` measure."""
