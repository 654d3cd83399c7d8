"""The version of comm-mnnvl, read by hatchling at build time and by the decision protocol at run time."""

__version__ = "0.1.0.dev0"
