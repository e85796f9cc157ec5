"""fits() and room(): what copies will cost and what the device must hold, from FLOPs, bytes and a machine's rates."""
