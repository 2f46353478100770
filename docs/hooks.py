"""What mkdocs asks while it builds the site: pages that lie elsewhere in the tree, and links as a git host shows them.

A page exists once. One that belongs beside what it describes (the chart's, the benchmarks') is added to the site from
there. Links are relative to the file, as git hosts follow them; they are turned into the site's here. A link to a file
that is no page leads to `repo_url` where that is set, and else is its text.
"""

import os
import posixpath
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
ELSEWHERE = {
    "charts/kvasir/RUNBOOKS.md": "runbooks.md",
    "charts/kvasir/README.md": "reference/chart.md",
    "images/README.md": "reference/images.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    f"{RESULTS}/README.md": "benchmarks/index.md",
    **{f"{RESULTS}/{path.name}": f"benchmarks/{path.name}" for path in (ROOT / RESULTS).glob("*-20*.md")},
}
"""Path in the tree to the page of the site."""
_FROM = {page: path for path, page in ELSEWHERE.items()}
_FENCED = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]\[]+)\]\((?P<target>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.repo_url = os.environ.get("KVASIR_REPOSITORY_URL") or config.repo_url
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    parts = _FENCED.split(markdown)
    return "".join(part if part.startswith("```") else with_links(part, here, config.repo_url) for part in parts)


def with_links(markdown: str, here: str, repository: str | None) -> str:
    """`here`: the page of the site that the links are on."""
    folder = PurePosixPath(_FROM.get(here, f"docs/{here}")).parent

    def link(found: re.Match[str]) -> str:
        path = posixpath.normpath(folder / found["target"])
        if path in ELSEWHERE or path.startswith("docs/"):
            target = posixpath.relpath(ELSEWHERE.get(path, path.removeprefix("docs/")), posixpath.dirname(here) or ".")
        elif not (ROOT / path).exists():
            return found[0]  # mkdocs says that it is missing
        elif repository:
            target = f"{repository.rstrip('/')}/blob/main/{path}"
        else:
            return found["text"]
        return f"{found['image']}[{found['text']}]({target}{found['anchor'] or ''})"

    return _LINK.sub(link, markdown)
