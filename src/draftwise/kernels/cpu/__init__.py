"""Native CPU kernels: C++ behind a plain C interface, loaded with ctypes, chosen by instruction set at run time."""
