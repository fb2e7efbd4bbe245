"""Makes the environment in which a real SGLang server runs on a machine without a GPU; `make sglang-cpu` calls it.

    python tools/sglang_cpu/install.py DIRECTORY

A virtual environment of its own: its packages do not go together with those of milesbatch. Called again, it installs
what is missing. Ends with status 1 and the reason when the environment cannot serve.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

HERE = Path(__file__).parent
TORCH = os.environ.get("TORCH", "torch==2.13.0")
CHECK = """
import torch, sgl_kernel, torchvision, sglang.version
assert torch.version.cuda is None, f"torch {torch.__version__} is built for CUDA"
import sglang.srt.server_args
print(f"SGLang {sglang.version.__version__} with torch {torch.__version__}")
"""


def main(directory: Path) -> int:
    if not (directory / "bin" / "python").exists():
        venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # torch first and by itself, as in .venv: where it comes from is pip's configuration, or TORCH.
    for packages in ([TORCH], ["--requirement", HERE / "requirements.txt"]):
        if subprocess.run([*pip, *packages]).returncode != 0:
            return failed(f"pip could not install {packages[-1]}: see above; the same command again goes on")
    packages = sysconfig.get_path("purelib", "venv", {"base": str(directory), "platbase": str(directory)})
    shutil.copytree(HERE / "shim", packages, dirs_exist_ok=True)
    check = subprocess.run([python, "-c", CHECK], capture_output=True, text=True)
    if check.returncode != 0:
        reason = check.stderr.strip().splitlines()[-1] if check.stderr.strip() else "no reason given"
        return failed(
            f"SGLang cannot be imported in {directory}: {reason}. If it speaks of CUDA: configure pip for CPU builds of"
            " torch, or set TORCH, remove the directory, and try again"
        )
    print(check.stdout.strip())
    return 0


def failed(what: str) -> int:
    print(f"error: {what}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
