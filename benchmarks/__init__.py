"""Benchmarks that run all peers in one process or one session; results/ holds what they measured."""
