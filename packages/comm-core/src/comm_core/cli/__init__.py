"""commctl: what this installation and this machine can do, and why."""
