"""The main job on this machine: sequence-parallel attention over a real picture, checked against the unsharded layer.

``python -m comm_core.demo`` starts the ranks, runs, compares and explains; it needs the extra ``comm-core[demo]`` for
the picture. Nothing here is imported by the rest of the package.
"""
