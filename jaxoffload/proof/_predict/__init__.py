"""predict(): how long a step takes, and what device and host must hold, from FLOPs, bytes and a machine's rates."""
