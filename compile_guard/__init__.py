"""Make `torch.compile` safe in threaded programs."""
