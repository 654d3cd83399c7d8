"""Plugins: the hooks, isolated discovery, and a report of what became of each plugin."""

from __future__ import annotations

from comm_core.plugins.discovery import PluginReport, Registry, register, registry, report, unregister
from comm_core.plugins.hookspecs import API_VERSION, ENTRY_POINT_GROUP, CommSpecs, hookimpl

__all__ = [
    "API_VERSION",
    "ENTRY_POINT_GROUP",
    "CommSpecs",
    "PluginReport",
    "Registry",
    "hookimpl",
    "register",
    "registry",
    "report",
    "unregister",
]
