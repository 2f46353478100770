"""Where a model's files come from: the `scheme://` addresses of `model.source`.

Only reading of the address is here; what a scheme becomes in a pod is resources/model_volume.py.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal, cast

Scheme = Literal["hf", "s3", "pvc", "oci", "file"]

SOURCE_PATTERN: Final = (
    r"^(hf://[\w.-]+/[\w.-]+(@[\w./-]+)?|s3://[a-z0-9.-]+(/.*)?|pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/.*)?"
    r"|oci://[\w.-]+(:[0-9]+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]+)?|file:///.+)$"
)
SOURCE_MESSAGE: Final = (
    "write hf://ORG/NAME[@REVISION], s3://BUCKET[/PREFIX], pvc://CLAIM[/PATH], oci://IMAGE or file:///PATH"
)
PARENT_MESSAGE: Final = "write the path without .. in it"


def is_source(text: str) -> bool:
    """Whether it has the form of an address."""
    return re.fullmatch(SOURCE_PATTERN, text) is not None


def has_no_parent(text: str) -> bool:
    """Whether its path stays below where it starts."""
    return ".." not in text.split("/")


@dataclass(frozen=True)
class ModelSource:
    """An address of model files.

    address: what follows the scheme up to the first slash (claim, bucket), or all of it for hf and oci; empty for file.
    path: the rest; absolute for file, without a leading slash for pvc and s3, empty for hf and oci.
    """

    text: str

    def __post_init__(self) -> None:
        if not is_source(self.text):
            raise ValueError(SOURCE_MESSAGE)
        if not has_no_parent(self.text):
            raise ValueError(PARENT_MESSAGE)

    @property
    def scheme(self) -> Scheme:
        return cast(Scheme, self.text.partition("://")[0])

    @property
    def is_downloaded(self) -> bool:
        """Into a cache, by the loader; the others are volumes."""
        return self.scheme in ("hf", "s3")

    @property
    def address(self) -> str:
        rest = self.text.partition("://")[2]
        return rest if self.scheme in ("hf", "oci") else rest.partition("/")[0]

    @property
    def path(self) -> str:
        rest = self.text.partition("://")[2]
        if self.scheme in ("hf", "oci"):
            return ""
        return rest if self.scheme == "file" else rest.partition("/")[2].strip("/")
