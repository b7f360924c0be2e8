"""Runs each of our CUDA kernels once at the shapes of the tests: `python -m benchmarks.gpu.run_every_kernel`.

It is the process that compute-sanitizer watches, and needs neither pytest nor Ray.
"""

import sys

import torch

from tests.support.triton_interpreted import CASES, DEVICE


def main() -> int:
    if DEVICE != "cuda" or not torch.cuda.is_available():
        print("no CUDA device, or TRITON_INTERPRET is set")
        return 2
    with torch.inference_mode():
        for name, case in CASES.items():
            if not name.startswith(("decoder", "sharing")):  # these run on the CPU
                case()
                print(name, flush=True)
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
