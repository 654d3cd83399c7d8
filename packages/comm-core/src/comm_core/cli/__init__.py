"""Command line: ``commctl``."""
