"""Estimate the seconds that a jaxpr takes on a GPU."""
