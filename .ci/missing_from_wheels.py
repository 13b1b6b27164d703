"""Fails if one of the packages' tracked files is in none of the wheels named as arguments."""

import subprocess
import sys
import zipfile

PACKAGES = {
    "python/": "python/sglang_lazy",
    "sgl-kernel-lazy/": "sgl-kernel-lazy/sgl_kernel_lazy",
    "sglang-lazy-policies/": "sglang-lazy-policies/sglang_lazy_policies",
}

packed = {name for wheel in sys.argv[1:] for name in zipfile.ZipFile(wheel).namelist()}
missing = [
    path
    for root, package in PACKAGES.items()
    for path in subprocess.check_output(["git", "ls-files", package], text=True).splitlines()
    if path.removeprefix(root) not in packed
]
if missing:
    sys.exit(f"in no wheel: {' '.join(missing)}")
