"""verify(): each claim about a loss or a training step, checked on the program itself."""
