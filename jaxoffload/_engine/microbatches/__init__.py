"""Run the forward pass of one microbatch beside the backward pass of another."""
