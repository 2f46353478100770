"""What comes before all work: the API server answers, and knows InferenceServices.

An operator that ended because the API server is away would be started again later and later, by the kubelet's back-off.
"""

import asyncio
import logging

from kvasir_operator.errors import CrdNotInstalledError, KubeUnavailableError, ObjectNotFoundError
from kvasir_operator.kinds import INFERENCE_SERVICE
from kvasir_operator.kube import KubeClient
from kvasir_operator.queue import BackOff

logger = logging.getLogger(__name__)

_BACK_OFF = BackOff(first_seconds=0.5, longest_seconds=5.0)
_UNAUTHORIZED = 401


async def wait_until_served(client: KubeClient, namespace: str | None, back_off: BackOff = _BACK_OFF) -> None:
    """Tries again for as long as the API server is away, and logs each cause once, not each try.

    Raises CrdNotInstalledError for a missing CRD, other KubeApiErrors where waiting would not help.
    """
    told, num_failures = "", 0
    while (trouble := await _trouble(client, namespace)) is not None:
        if trouble != told:
            logger.warning("waiting for the API server: %s", trouble)
        told, num_failures = trouble, num_failures + 1
        await asyncio.sleep(back_off.delay_seconds(num_failures))
    if told:
        logger.info("the API server answers")


async def _trouble(client: KubeClient, namespace: str | None) -> str | None:
    """What keeps the API server from listing services that may pass by itself; None when nothing does."""
    try:
        await anext(client.list_pages(INFERENCE_SERVICE, namespace))
    except ObjectNotFoundError as error:
        name = f"{INFERENCE_SERVICE.plural}.{INFERENCE_SERVICE.group}"
        raise CrdNotInstalledError(
            f"the cluster has no CRD {name}: install it with `kubectl apply -f crds/`"
        ) from error
    except KubeUnavailableError as error:
        if error.status == _UNAUTHORIZED:
            raise
        return str(error)
    return None
