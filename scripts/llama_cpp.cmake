# Read by CMake when llama-cpp-python is compiled (Makefile). It asks for llama.cpp's library of command-line helpers
# too, which takes half of the time, and which neither its Python package nor this one loads.
set(LLAMA_BUILD_COMMON OFF)
