"""Kernels in C++ for a CPU, built by this machine's compiler and called through XLA's FFI."""

from jaxserve.kernels.native.build import NativeUnavailableError, load_native

__all__ = ["NativeUnavailableError", "load_native"]
