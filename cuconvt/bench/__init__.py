"""The benchmark, ``python -m cuconvt bench``: correctness, time, memory and the hardware's floor, beside PyTorch."""
