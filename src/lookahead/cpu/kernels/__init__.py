"""What is compiled: the kernels of the CPU engine."""
