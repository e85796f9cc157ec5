"""Differentiate one layer, decide where its residuals live, and run the loops of a scan over layers."""
