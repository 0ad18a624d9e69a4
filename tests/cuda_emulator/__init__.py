"""The CUDA kernels executed on a CPU, for tests. docs/cuda-emulator.md is the guide."""
