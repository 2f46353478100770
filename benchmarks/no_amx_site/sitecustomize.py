"""Loaded by each Python under without_amx.py: vLLM, which asks the processor alone, learns of no AMX either."""

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

MODULE = "torch.cpu"


class TileFinder:
    """Finds `torch.cpu` as always, and has it answer that tiles are not supported."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_without_tiles(module: ModuleType) -> None:
            execute(module)
            module._is_amx_tile_supported = lambda: False  # type: ignore[attr-defined]

        spec.loader.exec_module = execute_without_tiles  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, TileFinder)
