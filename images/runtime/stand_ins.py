"""Makes torch's CUDA build importable without the CUDA libraries, where no GPU will ever be used.

    stand_ins.py FOLDER        FOLDER holds `torch`, and those CUDA libraries that shall be real

torch's libraries are linked against 2 GB of others, and a library that is missing fails the import. For each of those
an empty one is put beside torch's, with every function that torch's libraries name; all of them return 1, which CUDA's
libraries call an error. Where nothing is missing, as in a torch built without CUDA, nothing is made.
"""

import ctypes
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

LOADED_BY_IMPORT = ("libtorch_global_deps.so", "libtorch_python.so")


@dataclass(frozen=True)
class Symbol:
    name: str
    version: str
    is_defined: bool
    is_optional: bool


def main() -> None:
    folder = Path(sys.argv[1])
    libraries = folder / "torch" / "lib"
    loaded = loaded_libraries(libraries)
    present = {file.name for file in folder.rglob("*.so*")} | system_libraries()
    missing = sorted({name for library in loaded for name in needed(library)} - present)
    if not missing:
        print("torch's libraries lack nothing")
        return
    functions = functions_by_library(loaded, missing)
    for name in missing:
        compile_stand_in(libraries / name, functions[name])
        print(f"{name}: empty, {sum(map(len, functions[name].values()))} functions")


def loaded_libraries(folder: Path) -> list[Path]:
    """torch's own libraries that `import torch` loads."""
    found: list[Path] = []
    waiting = [folder / name for name in LOADED_BY_IMPORT]
    while waiting:
        library = waiting.pop()
        if library not in found and library.exists():
            found.append(library)
            waiting += [folder / name for name in needed(library)]
    return found


def needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("--dynamic", library))


def system_libraries() -> set[str]:
    listed = subprocess.run(["/sbin/ldconfig", "--print-cache"], check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"^\s+(\S+) \(", listed, re.MULTILINE))


def functions_by_library(loaded: list[Path], missing: list[str]) -> dict[str, dict[str, set[str]]]:
    """By library and symbol version ("" for none) the functions that `loaded` want of the missing libraries.

    A symbol without a version does not say whose it is, and the loader does not mind: the first library gets them all.
    """
    found = {library: symbols(library) for library in loaded}
    defined = {symbol.name for of_library in found.values() for symbol in of_library if symbol.is_defined}
    functions: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for library, of_library in found.items():
        owners = libraries_by_version(library)
        for symbol in of_library:
            if symbol.is_defined or symbol.is_optional:
                continue
            if owners.get(symbol.version) in missing:
                functions[owners[symbol.version]][symbol.version].add(symbol.name)
            elif not symbol.version and symbol.name not in defined and not is_pythons(symbol.name):
                functions[missing[0]][""].add(symbol.name)
    return functions


def is_pythons(name: str) -> bool:
    return hasattr(ctypes.pythonapi, name)


def symbols(library: Path) -> list[Symbol]:
    line = re.compile(r"^ *\d+: \S+ +\S+ +\w+ +(GLOBAL|WEAK|UNIQUE) +\w+ +(\w+) (\w+)(?:@@?(\S+))?", re.MULTILINE)
    return [
        Symbol(name, version, is_defined=section != "UND", is_optional=binding == "WEAK")
        for binding, section, name, version in line.findall(readelf("--dyn-syms", library))
    ]


def libraries_by_version(library: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for file, versions in re.findall(r"File: (\S+)(.*?)(?=File: |\Z)", readelf("--version-info", library), re.DOTALL):
        found |= dict.fromkeys(re.findall(r"Name: (\S+)", versions), file)
    return found


def readelf(what: str, library: Path) -> str:
    return subprocess.run(["readelf", "--wide", what, library], check=True, capture_output=True, text=True).stdout


def compile_stand_in(library: Path, functions: dict[str, set[str]]) -> None:
    names = sorted(name for of_version in functions.values() for name in of_version)
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder) / "stand_in.c", Path(folder) / "versions"
        source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in names))
        script.write_text("".join(version_node(version, functions[version]) for version in functions if version))
        command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-fno-builtin", "-w", f"-Wl,-soname,{library.name}"]
        if any(functions):
            command.append(f"-Wl,--version-script={script}")
        subprocess.run([*command, "-o", library, source], check=True)


def version_node(version: str, names: set[str]) -> str:
    return f"{version} {{ {' '.join(f'{name};' for name in sorted(names))} }};\n"


if __name__ == "__main__":
    main()
