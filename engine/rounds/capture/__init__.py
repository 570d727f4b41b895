"""Has the parts made for NVIDIA's devices: kernels, captured rounds, and their runner. docs/gpu.md explains
it.
"""
