"""The testing kit: rank pools, references, a contract suite for transports, and a transport with faults.

It is part of the package, so that the tests of a plugin use the same kit, and needs pytest (``comm-core[test]``).
Start with ``-p comm_core.testing.plugin`` and the fixture ``ranks``.
"""
