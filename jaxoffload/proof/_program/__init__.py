"""The program under test: traced (target, host_transfers), compiled (hlo, kernels) and run (trace)."""
