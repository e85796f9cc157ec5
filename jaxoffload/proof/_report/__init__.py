"""profile(), page() and pictures(): what a step's copies did, as tables, a page and images."""
