"""Run the tests of a GPU without one: the kernels by Triton's interpreter, on a CPU.

    python scripts/gpu_tests_on_cpu.py               # six to eight minutes on two cores
    python scripts/gpu_tests_on_cpu.py -k softmax    # some of them

In a copy of the package, what it does on a GPU it does on a CPU, and so do the tests of
tests/test_cuda.py. So their numbers, and the Python around the kernels, are checked as on a GPU
with Hopper's kernels. Left out are the tests of CUDA graphs. What only a GPU shows stays unseen:
whether kernels compile, waits and races, memory, and time.

Triton goes to build/triton, 700 MB, at the first call.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRITON = ROOT / "build/triton"
COPY = ROOT / "build/gpu_tests_on_cpu"
PACKAGES = ["triton==3.6.0", "numpy==2.1.3"]  # the interpreter fails with newer numpy
GRAPHS = "not graph and not captur and not replay and not an_autocast_around_it"
CONFTEST = '''
"""What a GPU would say, and products of bfloat16, which Triton's interpreter lacks."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

HOPPER = SimpleNamespace(shared_memory_per_multiprocessor=233472, multi_processor_count=132)
torch.cuda.device = lambda *_: nullcontext()
torch.cuda.get_device_properties = lambda *_: HOPPER
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_rng_state, torch.cuda.set_rng_state = torch.get_rng_state, torch.set_rng_state
torch.cuda.manual_seed = torch.manual_seed
product = InterpreterBuilder.create_dot


def widened(x):
    """Bits of bfloat16 are the first half of those of float32."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def create_dot(self, a, b, *rest):
    return product(self, widened(a), widened(b), *rest)


InterpreterBuilder.create_dot = create_dot
'''


def rewrite(path: Path, *changes: tuple[str, str]) -> None:
    """Replace patterns in a file."""
    text = path.read_text()
    for pattern, new in changes:
        text = re.sub(pattern, new, text, flags=re.MULTILINE)
    path.write_text(text)


def make_copy() -> None:
    """Copy package and tests, with a CPU in place of the GPU."""
    shutil.rmtree(COPY, ignore_errors=True)
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, COPY / folder)
    shutil.copy(ROOT / "pyproject.toml", COPY)
    for path in (COPY / "src").rglob("*.py"):
        rewrite(path, (r"\.is_cuda\b", ".is_cpu"))
    kernels = COPY / "src/newton_summary/derivatives/sweep/kernels.py"
    rewrite(kernels, ('device="cuda"', 'device="cpu"'))
    skipped = (r"^pytestmark = pytest\.mark\.skipif\(not torch\.cuda\.is_available.*$", "")
    rewrite(COPY / "tests/test_cuda.py", (r"\.cuda\(\)", ""), ('"cuda"', '"cpu"'), skipped)
    (COPY / "tests/conftest.py").write_text(CONFTEST)


def main() -> int:
    """Make the copy, and run the tests in it; return pytest's exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("-k", default="test", metavar="EXPRESSION", help="as for pytest")
    parser.add_argument("-n", default="2", metavar="PROCESSES", help="side by side, 2 by default")
    options = parser.parse_args()
    if not (TRITON / "numpy").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", TRITON]
        subprocess.run([*pip, *PACKAGES], check=True)
    make_copy()
    paths = os.pathsep.join(map(str, (TRITON, COPY / "src", COPY / "tests")))
    here = {"PYTHONPATH": paths, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    chosen = ["-k", f"({options.k}) and {GRAPHS}", "-n", options.n]
    quietly = ["-q", "-W", "ignore", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "tests/test_cuda.py", *quietly, *chosen]
    return subprocess.run(command, cwd=COPY, env=os.environ | here, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
