"""`kv_transfer_params` of requests: what a client's wish means on a server with this configuration."""

from starlette.requests import Request

from kvasir_runtime.config import KvTransferConfig
from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.server.errors import NotTheRouterError
from kvasir_runtime.server.protocol import GenerationFields
from kvasir_runtime.service_secret import SECRET_VARIABLE
from kvasir_runtime.transfer.params import KvTransferParams

FIELD = "kv_transfer_params"
TRUST_FLAG = "--kv-transfer-trust-clients"
STRANGER = "kvasir.stranger"
"""In the ASGI scope of a request that is not the router's (`router_trust`)."""


def transfer_params(
    request: Request, wishes: GenerationFields, transfer: KvTransferConfig | None, num_prompts: int = 1
) -> KvTransferParams | None:
    """None where nothing is asked for. Raises InvalidRequestError, and NotTheRouterError for a stranger's: this engine
    would connect to whatever they name, and keep blocks for whoever comes.
    """
    fields = wishes.kv_transfer_params
    if fields is None:
        return None
    params = KvTransferParams(
        do_remote_prefill=bool(fields.do_remote_prefill),
        do_remote_decode=bool(fields.do_remote_decode),
        remote_engine_id=fields.remote_engine_id,
        remote_request_id=fields.remote_request_id,
        remote_host=fields.remote_host,
        remote_port=fields.remote_port,
        transfer_id=fields.transfer_id,
    )
    if not (params.is_pull or params.do_remote_decode):
        return None
    if STRANGER in request.scope:
        raise NotTheRouterError(
            f"{FIELD}: only the router may say whom this engine exchanges KV with; it shows the value of "
            f"{SECRET_VARIABLE}, which both must be started with. For a router of another make start this engine with "
            f"{TRUST_FLAG}, where nobody else reaches it"
        )
    _check(params, transfer, num_prompts)
    return params


def _check(params: KvTransferParams, transfer: KvTransferConfig | None, num_prompts: int) -> None:
    if transfer is None:
        raise InvalidRequestError(
            f"{FIELD}: this server exchanges no KV with other engines; start it with --kv-transfer-config", FIELD
        )
    if params.do_remote_decode and not transfer.can_produce:
        raise InvalidRequestError(f"{FIELD}: do_remote_decode was asked of a server with kv_role kv_consumer", FIELD)
    if params.is_pull and not transfer.can_consume:
        raise InvalidRequestError(f"{FIELD}: do_remote_prefill was asked of a server with kv_role kv_producer", FIELD)
    if num_prompts > 1:
        raise InvalidRequestError(
            f"{FIELD} belongs to one prompt, but {num_prompts} were given; send several requests", FIELD
        )
