"""Ulysses: plans (pure geometry), communicator (front), head-chunk transforms."""
