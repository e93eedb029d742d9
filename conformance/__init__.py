"""PyTorch's own tests, run against this library."""
