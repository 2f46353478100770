"""Counts what Triton compiles: on a GPU by its hook, under the interpreter by the key that it would compile for."""

import sys
from typing import Any

import pytest
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from kvasir_runtime.kernels.launches import Launcher


class Compilations:
    """`kernels` names each, with what it was compiled for, in their order; what was compiled before is forgotten."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels: list[str] = []
        if knobs.runtime.interpret:
            launch = InterpretedFunction.run
            self._binders: dict[InterpretedFunction[Any], Any] = {}
            monkeypatch.setattr(
                InterpretedFunction,
                "run",
                lambda kernel, *args, **kwargs: (self._note(kernel, args, kwargs), launch(kernel, *args, **kwargs))[1],
            )
            return
        monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **call: self.kernels.append(call["repr"]))
        for kernel in _of_modules(JITFunction):
            kernel.device_caches.clear()
        for launcher in _of_modules(Launcher):
            launcher.clear()

    def _note(self, kernel: "InterpretedFunction[Any]", args: Any, kwargs: Any) -> None:
        options = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
        if kernel not in self._binders:
            compiled = JITFunction(kernel.fn, **kernel.kwargs)
            target = make_backend(GPUTarget("cuda", 90, 32))
            self._binders[kernel] = create_function_from_signature(compiled.signature, compiled.params, target)
        _, specialization, rest = self._binders[kernel](*args, **options)
        key = f"{kernel.__name__} {specialization} {rest}"
        if key not in self.kernels:
            self.kernels.append(key)


def _of_modules(kind: type) -> list[Any]:
    modules = [module for name, module in sys.modules.items() if name.startswith("kvasir_runtime.kernels.")]
    return [value for module in modules for value in vars(module).values() if isinstance(value, kind)]
