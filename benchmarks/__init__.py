"""Peers side by side in one run; what was measured is in results/."""
