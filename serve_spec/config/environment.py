"""`serve-spec collect-env`: print what an issue needs to know of the machine."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("torch", "triton", "ray", "transformers", "tokenizers", "huggingface_hub", "gguf")
_GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_PREFIXES = ("SERVE_SPEC_", "RAY_", "CUDA_", "HF_HUB_", "OMP_")
_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of `serve-spec collect-env`."""
    return argparse.ArgumentParser(prog="serve-spec collect-env", description=__doc__)


def main(argv: list[str]) -> int:
    """Print versions, machine and environment variables without secrets; return 0."""
    command_parser().parse_args(argv)
    lines = {"serve_spec": _version("serve_spec"), "python": sys.version.split()[0]}
    lines |= {name: _version(name) for name in _PACKAGES}
    lines |= {"system": platform.platform(), "CPUs": str(os.cpu_count()), "GPUs": _gpus()}
    for name in sorted(os.environ):
        if name.startswith(_PREFIXES):
            is_secret = any(word in name for word in _SECRETS)
            lines[name] = "<hidden>" if is_secret else os.environ[name]
    for name, value in lines.items():
        print(f"{name}: {value}")
    return 0


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _gpus() -> str:
    """Return name, memory and driver of each GPU."""
    try:
        done = subprocess.run(_GPU_QUERY, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none seen by nvidia-smi"
    return "; ".join(done.stdout.strip().splitlines())
