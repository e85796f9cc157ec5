"""Decide what a policy makes of the named values of a jaxpr, and checkpoints under these decisions."""
