"""An installation with a gateway, for the tests of the operator."""

from kvasir_operator.api.defaults import GatewayDefaults, InstallationDefaults
from kvasir_operator.settings import OperatorSettings

GATEWAY = GatewayDefaults("kvasir", "kvasir-gateway", {"app.kubernetes.io/component": "gateway"})
WITH_GATEWAY = OperatorSettings(defaults=InstallationDefaults(gateway=GATEWAY), gateway_secret="gateway-secret")
