"""What the guard saw, for people and for programs."""
