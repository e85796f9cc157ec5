"""plan(): the policy whose predicted step is the fastest of those that fit in a budget of device memory."""
