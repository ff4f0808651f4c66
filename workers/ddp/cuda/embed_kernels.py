#!/usr/bin/env python3
"""Compiles a kernel module with nvcc and writes the result as a C++ array named <module>_image.

embed_kernels.py [--no-spills] NVCC INCLUDE MODULE SOURCE OUTPUT DEPFILE
embed_kernels.py --check NVCC INCLUDE SOURCE                 only tries, and says why not

With --no-spills a kernel that does not fit into registers is an error: on a device it would be slow, and nothing else
would tell. Another compiler may need more of them, so it is for those who change kernels.

Without a compiler (NVCC is "") the array says so: the program still links, and asking for a kernel on a real
device is an error that tells why.
"""
import os
import subprocess
import sys
import tempfile


def compile_kernels(nvcc, include, source, fatbin, extra=()):
    # Machine code for what there is, PTX for later chips. No contraction: the host's bits. Not compressed: a driver
    # that is older than the compiler may not know how.
    return subprocess.run([nvcc, "-x", "cu", "-std=c++20", "-O3", "-fmad=false", "-fatbin", "-no-compress", "-I", include,
                           "-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=sm_90",
                           "-gencode", "arch=compute_90,code=compute_90", "-Werror", "all-warnings",
                           *extra, source, "-o", fatbin]).returncode


def image_of(nvcc, include, source, output, depfile, extra):
    if not nvcc:
        with open(depfile, "w") as file:
            file.write(f"{output}: {source}\n")
        return b"no device code\0"
    fatbin = output + ".fatbin"
    code = compile_kernels(nvcc, include, source, fatbin, ["-MD", "-MF", depfile, "-MT", output, *extra])
    if code != 0:
        sys.exit(code)
    with open(fatbin, "rb") as file:
        image = file.read()
    os.remove(fatbin)
    return image


def write_array(image, module, output):
    with open(output, "w") as file:
        file.write(f"extern \"C\" const unsigned char {module}_image[];\n"
                   f"alignas(16) const unsigned char {module}_image[] = {{\n")
        for at in range(0, len(image), 24):
            file.write(",".join(map(str, image[at:at + 24])) + ",\n")
        file.write("};\n")


if sys.argv[1] == "--check":
    with tempfile.TemporaryDirectory() as directory:
        sys.exit(compile_kernels(*sys.argv[2:], directory + "/check.fatbin"))
arguments = sys.argv[1:]
options = []
if arguments[0] == "--no-spills":
    arguments.pop(0)
    options = ["-Xptxas", "--warn-on-spills,--warn-on-local-memory-usage"]
nvcc, include, module, source, output, depfile = arguments
write_array(image_of(nvcc, include, source, output, depfile, options), module, output)
