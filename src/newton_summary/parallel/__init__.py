"""Several processes: ranks that measure together, and parameters that FSDP2 divides among them."""
