"""Common code of the `--attn-engine library` modes: importing the libraries, and flash-attn as the kernel."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from ..kernels.flash_attn import FlashAttnKernel
from .base import ParallelMode


class LibraryMode(ParallelMode):
    """A mixin that replaces a mode's attention over several ranks by a library's. List it before the mode's class."""

    @classmethod
    def check_kernel_name(cls, name):
        if name not in ("auto", FlashAttnKernel.name):
            raise ValueError(
                f"attn_kernel {name} cannot be used with attn_engine library, whose libraries call flash-attn: "
                f"use attn_kernel auto or {FlashAttnKernel.name}"
            )

    @classmethod
    def check_kernel(cls, name, device, dtype, head_dim, documents=False):
        cls.check_kernel_name(name)
        cls._refuse_documents(documents)
        if reason := FlashAttnKernel().unsupported_reason(device, dtype, head_dim):
            raise ValueError(f"attn_engine library cannot be used here: {reason}. Use attn_engine easy_context.")

    @classmethod
    def select_kernel(cls, name, device, dtype, head_dim, documents=False):
        cls._refuse_documents(documents)
        # Do not select by name: a stand-in may be installed under flash-attn's name, and it also works without CUDA.
        return FlashAttnKernel()

    @classmethod
    def check_window(cls, window):
        if window is not None:
            raise ValueError(
                f"sliding_window={window} is shorter than the row, and attn_engine library attends to all of it: use "
                "attn_engine easy_context, or set config.sliding_window = None to train full attention"
            )

    @staticmethod
    def _refuse_documents(documents):
        if documents:
            raise ValueError("attn_engine library attends across the documents of a row: use attn_engine easy_context")


def import_library(module: str, requirement: str, importer: Callable[[str], Any] = importlib.import_module) -> Any:
    """Import a library's module, and flash-attn, which all of these libraries call.

    Raises:
        ValueError: an import fails; the message names the package to install.
    """
    for name, install, run in (
        ("flash_attn.flash_attn_interface", "flash-attn --no-build-isolation", importlib.import_module),
        (module, requirement, importer),
    ):
        try:
            library = run(name)
        except ImportError as error:
            raise ValueError(
                f"attn_engine library cannot import {name} ({error}): pip install {install}, or use "
                "attn_engine easy_context"
            ) from error
    return library


def import_without_package(module: str) -> Any:
    """Import `package.module` without running the package's `__init__`, for packages whose `__init__` no longer works.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    package = module.partition(".")[0]
    if package not in sys.modules:
        if (spec := importlib.util.find_spec(package)) is None:
            raise ModuleNotFoundError(f"{package.replace('_', '-')} is not installed")
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(module)
