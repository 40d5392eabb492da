"""Triton kernels; importing one needs Triton, which CPU builds of torch come without."""
