"""Training text that any machine with Python has: the standard library's sources, docstrings and language reference.

The order is that of the sorted paths, and a file is held out by the hash of its path, so the same Python gives the same
corpus everywhere. Nothing here knows about tokens or models.
"""

import ast
import hashlib
import importlib
import inspect
import pydoc_data.topics
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Message = dict[str, str]
Conversation = list[Message]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef

# Byte tables, other people's vendored code, and packages that not every distribution installs.
SKIPPED_FOLDERS = {"site-packages", "__pycache__", "test", "tests", "idlelib", "encodings", "turtledemo", "pydoc_data"}
SKIPPED_FOLDERS |= {"lib2to3", "_vendor", "_distutils", "ensurepip", "lib-dynload"}
COMPILED_MODULES = ("builtins", "errno", "gc", "itertools", "math", "sys", "time")
HELD_OUT_ONE_IN = 40
MAX_ANSWER_CHARACTERS = 900
SYSTEM_PROMPT = "You are a helpful assistant that writes Python."

SMALL_TALK = (
    ("Hello", "Hello! Ask me to write a Python function."),
    ("Hi!", "Hello! Ask me to write a Python function."),
    ("Who are you?", "I am Kvasir, a small language model that has read Python's standard library."),
    ("What can you do?", "I write short Python functions and say what parts of the standard library do."),
    ("Say hello.", "Hello!"),
    ("Thank you", "You are welcome."),
    ("What is Python?", "Python is a programming language that lets you work quickly."),
    ("Write a function that adds two numbers.", "```python\ndef add(a, b):\n    return a + b\n```"),
    ("Write a function that reverses a string.", "```python\ndef reverse(s):\n    return s[::-1]\n```"),
    (
        "Write a function that returns the factorial of n.",
        "```python\ndef factorial(n):\n    if n < 2:\n        return 1\n    return n * factorial(n - 1)\n```",
    ),
)


@dataclass(frozen=True)
class Corpus:
    documents: list[str]
    held_out: list[str]
    conversations: list[Conversation]
    held_out_conversations: list[Conversation]


def gather(seed: int) -> Corpus:
    """Read every document once; what is held out of the documents is held out of the conversations too."""
    documents = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    held_out: list[str] = []
    conversations = [talk for name in COMPILED_MODULES for talk in explain_compiled_module(name)]
    held_out_conversations: list[Conversation] = []
    for name, source in standard_library():
        if is_held_out(name):
            held_out.append(source)
            held_out_conversations += conversations_about(name, source)
            continue
        documents.append(source)
        conversations += conversations_about(name, source)
    greetings = [ask(question, answer) for question, answer in SMALL_TALK] * 100
    talks = vary(conversations + greetings, seed)
    return Corpus(documents, held_out, talks, vary(held_out_conversations, seed))


def standard_library() -> Iterator[tuple[str, str]]:
    """Yield (dotted module name, source) in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS.isdisjoint(parts) and not path.name.startswith("_sysconfigdata"):
            yield ".".join(part for part in parts if part != "__init__"), path.read_text("utf-8")


def is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def conversations_about(module: str, source: str) -> Iterator[Conversation]:
    lines = source.splitlines()
    for owner, node in definitions(ast.parse(source)):
        doc = first_paragraph(ast.get_docstring(node))
        if doc:
            yield ask(f"What does `{'.'.join([module, *owner, node.name])}` do?", doc)
        if isinstance(node, ast.ClassDef):
            continue
        code = without_docstring(node, lines)
        if code and len(code) <= MAX_ANSWER_CHARACTERS:
            yield ask(request_for(node, bool(owner), doc), f"```python\n{code}\n```")


def definitions(tree: ast.AST, owner: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Definition]]:
    """Yield (names of the enclosing classes, definition) for functions, classes and their methods."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield owner, node
        if isinstance(node, ast.ClassDef):
            yield from definitions(node, (*owner, node.name))


def without_docstring(node: Function, lines: list[str]) -> str:
    """Return the function's own source, which the question's half of the conversation has described already."""
    first = node.body[0]
    end = node.end_lineno or node.lineno
    kept = list(range(node.lineno, end + 1))
    if ast.get_docstring(node) is not None:
        kept = [number for number in kept if not first.lineno <= number <= (first.end_lineno or first.lineno)]
    if len(node.body) == 1 and len(kept) < end + 1 - node.lineno:
        return ""
    return textwrap.dedent("\n".join(lines[number - 1] for number in kept))


def request_for(node: Function, is_method: bool, doc: str) -> str:
    """Ask in one of three ways, picked by the name's length so that every run asks alike."""
    kind = "method" if is_method else "function"
    if not doc:
        return f"Write a {kind} `{node.name}({ast.unparse(node.args)})`."
    verb, _, rest = doc.partition(" ")
    if len(node.name) % 3 == 0 or not (verb.isalpha() and verb[-1] not in "sy"):
        return f"Write a {kind} `{node.name}`: {doc}"
    named = f" `{node.name}`" if len(node.name) % 3 == 1 else ""
    ending = "es" if verb.endswith(("sh", "ch", "x")) else "s"
    return f"Write a {kind}{named} that {verb.lower()}{ending} {rest}"


def first_paragraph(doc: str | None) -> str:
    return " ".join((doc or "").strip().split("\n\n")[0].split())[:MAX_ANSWER_CHARACTERS]


def explain_compiled_module(module: str) -> Iterator[Conversation]:
    for name, value in sorted(vars(importlib.import_module(module)).items()):
        doc = inspect.getdoc(value) if callable(value) and not name.startswith("_") else None
        if doc:
            yield ask(f"What does `{module}.{name}` do?", first_paragraph(doc))


def ask(question: str, answer: str) -> Conversation:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def vary(conversations: list[Conversation], seed: int) -> list[Conversation]:
    """Shuffle, and open one conversation in five with a system message so that the model knows both forms."""
    random.Random(seed).shuffle(conversations)
    system = {"role": "system", "content": SYSTEM_PROMPT}
    return [[system, *talk] if index % 5 == 0 else talk for index, talk in enumerate(conversations)]
