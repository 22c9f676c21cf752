"""Runs the CUDA kernels on the host, under AddressSanitizer and UndefinedBehaviorSanitizer: no GPU is needed."""
