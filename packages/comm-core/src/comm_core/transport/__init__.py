"""Transports: the interface, plans, and torch.distributed as the reference implementation."""
