"""Kernels on the host: the rendered text under a C++ compiler, on an emulated machine."""
