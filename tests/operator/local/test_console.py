"""Lines of several pods on one terminal."""

import asyncio
import io

from kvasir_operator.local.console import Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def relayed(chunks: list[bytes]) -> list[str]:
    async def main() -> str:
        source = asyncio.StreamReader()
        for chunk in chunks:
            source.feed_data(chunk)
        source.feed_eof()
        output = io.StringIO()
        await Console(["a"], output).relay("a", source)
        return output.getvalue()

    return asyncio.run(main()).splitlines()


def test_prefixes_are_aligned() -> None:
    output = io.StringIO()
    console = Console(["engine-0", "r"], output)
    console.say("one")
    console.write("engine-0", "two")
    console.write("r", "three")

    assert output.getvalue().splitlines() == ["[local]    one", "[engine-0] two", "[r]        three"]


def test_prefixes_are_coloured_on_a_terminal_only() -> None:
    terminal = Terminal()
    Console(["a", "b"], terminal).write("b", "text")

    assert terminal.getvalue() == "\033[32m[b]    \033[0m text\n"


def test_lines_are_kept_whole_across_chunks() -> None:
    assert relayed([b"one\ntw", b"o\r\nthree"]) == ["[a]     one", "[a]     two", "[a]     three"]


def test_a_line_without_end_is_cut() -> None:
    lines = relayed([b"x" * 70_000, b"\nend\n"])

    assert [len(line.replace("[a]     ", "")) for line in lines] == [65536, 4464, 3]


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert relayed([b"a\xff\n"]) == ["[a]     a\N{REPLACEMENT CHARACTER}"]
