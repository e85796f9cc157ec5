"""Read and rewrite jaxprs: walks, values and their names, sources of residuals, flat programs and their bytes."""
