"""The native CPU kernels: C++ in src/, loaded through ctypes when the package was built with a compiler."""
