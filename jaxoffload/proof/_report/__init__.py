"""profile() and page(): what a step's copies did, as tables and as a page."""
