"""What comes before all work: the API server answers, knows InferenceServices, and says what else it serves.

An operator that ended because the API server is away would be started again later and later, by the kubelet's back-off.
"""

import asyncio
import logging
from collections.abc import Sequence

from kvasir_operator.errors import CrdNotInstalledError, KubeUnavailableError, ObjectNotFoundError
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.features import ClusterFeatures, read_features
from kvasir_operator.kube.kinds import INFERENCE_SERVICE
from kvasir_operator.queue.back_off import BackOff

logger = logging.getLogger(__name__)

_BACK_OFF = BackOff(first_seconds=0.5, longest_seconds=5.0)
_UNAUTHORIZED = 401


async def wait_until_served(
    client: KubeClient, namespaces: Sequence[str] | None, back_off: BackOff = _BACK_OFF
) -> ClusterFeatures:
    """Tries again for as long as the API server is away, and logs each cause once, not each try.

    Raises CrdNotInstalledError for a missing CRD, other KubeApiErrors where waiting would not help.
    """
    logged, num_failures = "", 0
    while True:
        try:
            features = await _ask(client, namespaces)
            break
        except KubeUnavailableError as error:
            if error.status == _UNAUTHORIZED:
                raise
            if str(error) != logged:
                logger.warning("waiting for the API server: %s", error)
            logged, num_failures = str(error), num_failures + 1
        await asyncio.sleep(back_off.delay_seconds(num_failures))
    if logged:
        logger.info("the API server answers")
    return features


async def _ask(client: KubeClient, namespaces: Sequence[str] | None) -> ClusterFeatures:
    try:
        for namespace in namespaces or (None,):
            await anext(client.list_pages(INFERENCE_SERVICE, namespace))
    except ObjectNotFoundError as error:
        raise CrdNotInstalledError(f"{INFERENCE_SERVICE.plural}.{INFERENCE_SERVICE.group}") from error
    return await read_features(client)
