"""Launches Triton kernels again without Triton's look at every argument.

Triton binds and classifies the arguments of each launch in Python, to find what it has compiled for such ones, and a
step without a CUDA graph makes some 200 launches. Here the kinds of arguments are told by as much as a compilation
depends on, and what was compiled for them is launched as Triton would.
"""

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvasir_runtime.kernels.dependent_launch_triton import has_dependent_launch

INT32 = range(-(2**31), 2**31)
ALIGNMENT = 16


class Launcher:
    """Of one kernel, whose constants stand behind its other arguments."""

    def __init__(self, kernel: "JITFunction[Any]", *, starts_early: bool = False) -> None:
        """`starts_early`: it waits for the kernel before it by itself (`dependent_launch_triton`)."""
        self._kernel = kernel
        self._starts_early = starts_early
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        """Kinds of arguments -> what Triton compiled for them, and the values of its constants."""

    def clear(self) -> None:
        """Ask Triton again for everything."""
        self._compiled.clear()

    def __call__(self, grid: tuple[int, ...], first: Tensor, *arguments: Any, **constants: Any) -> None:
        """As `kernel[grid](first, *arguments, **constants)`; options as num_warps are among the constants."""
        self.prepare(grid, *arguments, **constants)(first)

    def prepare(self, grid: tuple[int, ...], *last: Any, **constants: Any) -> Callable[..., None]:
        """A launch that still lacks its first arguments, a tensor at least."""
        whole_grid = (*grid, 1, 1)[:3]
        kinds = (*map(_kind, last), *constants.items())

        def launch(*first: Any) -> None:
            device = first[0].get_device()
            key = (device, *map(_kind, first), kinds)
            found = self._compiled.get(key)
            if found is None:
                options = {"launch_pdl": True} if self._starts_early and has_dependent_launch(first[0].device) else {}
                compiled = self._kernel[grid](*first, *last, **constants, **options)
                if device >= 0 and compiled is not None:  # neither interpreted nor only compiled
                    names = self._kernel.arg_names[len(first) + len(last) :]
                    self._compiled[key] = compiled, tuple(constants[name] for name in names)
                return
            compiled, values = found
            stream = driver.active.get_current_stream(device)
            no_hooks = None, None, None
            compiled.run(
                *whole_grid, stream, compiled.function, compiled.packed_metadata, *no_hooks, *first, *last, *values
            )

        return launch


def _kind(argument: Any) -> Hashable:
    """What Triton compiles anew for: of a tensor type and alignment, of a whole number whether it is 1, a multiple of
    16 and how wide; those of `do_not_specialize` are told apart here, too, which does no harm."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT == 0
    if type(argument) is int:
        return argument == 1, argument % ALIGNMENT == 0, argument in INT32
    return type(argument).__name__
