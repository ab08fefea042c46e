"""Triton's kernels as machine code, which needs no GPU: the interpreter takes what the compiler
refuses.
"""

import importlib
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest


def compiled(kernel, signature, constants, attributes, capability, **options):
    """The code of each stage, by its name, for a GPU of compute capability ``capability``."""
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 3):
        pytest.skip("this Triton takes other arguments")
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    source = compiler.ASTSource(kernel, signature, constants, attributes)
    return compiler.compile(source, target=target, options=options).asm


def resources(cubin, folder):
    """Registers of a thread, and bytes of its stack and local memory, as `cuobjdump` knows them."""
    triton = importlib.import_module("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton comes without cuobjdump")
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    told = subprocess.run(
        [tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True
    ).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", told))
    return int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"])
