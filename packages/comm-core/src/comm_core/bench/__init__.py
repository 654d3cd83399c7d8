"""Benchmarks: what ``commctl bench`` measures, and what a plugin builds its own benchmark from.

`geometry` and `goals` are plain data, `launch` has the rank processes, `floor` and `timing` measure on a rank,
`contenders` are the ways to exchange that are compared, `ulysses` puts them together, `report` and `plot` show what
came out. Nothing here imports torch until a rank measures something.
"""
