"""PTX, as nvcc writes it for the kernels, translated into C++ that runs on `csrc/emulator`."""
