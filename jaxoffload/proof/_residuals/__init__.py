"""residuals(): the table of what autodiff keeps of a function, where, and why."""
