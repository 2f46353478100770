"""`kv_transfer_params`: how a router ties the two legs of a request together, in the shapes of vLLM's NIXL connector.

The prefill leg is asked with `do_remote_decode` and answers with what the decode leg is then asked with. Ours besides:
with a `transfer_id` that the router draws both legs can start at once, and with `remote_host` and `remote_port` alone
the decode side asks a peer for whatever it has cached.
"""

import msgspec


class KvTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """A request's, or an answer's; every field is sent, absent ones as null, as vLLM's routers expect."""

    do_remote_prefill: bool = False
    """The blocks of the prompt are to be pulled from the engine named below."""
    do_remote_decode: bool = False
    """The blocks of the prompt are to be kept for another engine."""
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: list[int | list[int]] | None = None
    """Of the full blocks; a list for each KV group where there are several. Told for others' sake: our engines ask the
    side channel, which names each block's hash and checksum as well."""
    remote_host: str | None = None
    remote_port: int | None = None
    """Of the side channel."""
    tp_size: int | None = None
    dcp_size: int | None = None
    """Ranks that split a sequence's KV among them when decoding: ours never do."""
    pp_size: int | None = None
    remote_num_tokens: int | None = None
    """That the blocks hold."""
    transfer_mode: str | None = None
    """`pull`: the decode side reads the blocks; ours know no other."""
    transfer_id: str | None = None

    @property
    def is_pull(self) -> bool:
        """Whether blocks are to come from elsewhere, and it is known from where."""
        return self.remote_host is not None and self.remote_port is not None

    @property
    def remote_key(self) -> str | None:
        """Under which the prefill side keeps the blocks; None: it is asked for what it has cached, as a peer is of a
        prompt that is itself kept for another."""
        return None if self.do_remote_decode else self.transfer_id or self.remote_request_id
