"""Topology: facts (records), probe (never raises), predicates (pure)."""
