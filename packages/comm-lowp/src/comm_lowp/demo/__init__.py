"""``commctl demo lowp``: an exchange of Q, K and V in low precision between CPU ranks, and what it costs in accuracy.

The parts: `command` (options, and what is printed), `job` (what a rank does), `worker` (the entry of a rank process).
"""
