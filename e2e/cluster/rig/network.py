"""How the cluster's parts are addressed: in IPv4, or in IPv6 alone, where nothing but loopback has an IPv4 address.

All addresses are private ones that no route leads to: 10.0.0.0/8, and unique local ones under fd00::/8.
"""

import ipaddress
import string
from dataclasses import dataclass

from e2e.cluster.rig.layout import API_PORT, Node


@dataclass(frozen=True)
class Network:
    family: str
    """As `up --ip-family` takes it."""
    machines: str
    """The bridge's network: the control plane has its first address, node N the one that ends in 10 + N."""
    pods: str
    services: str
    dns: str
    every_host: str
    """Where a default route leads to."""

    @property
    def control_plane(self) -> str:
        return self._machine(1)

    @property
    def version(self) -> int:
        return ipaddress.ip_network(self.machines).version

    @property
    def every_address(self) -> str:
        """What a server listens on to be reached under every address of its family."""
        return self.every_host.partition("/")[0]

    @property
    def prefix_length(self) -> int:
        return ipaddress.ip_network(self.machines).prefixlen

    @property
    def api_server(self) -> str:
        """Its URL, for whoever is inside the cluster."""
        return f"https://{in_url(self.control_plane)}:{API_PORT}"

    @property
    def address_options(self) -> tuple[str, ...]:
        """Of `ip address add`: else an IPv6 address waits a second for the kernel to look for duplicates."""
        return ("nodad",) if self.version == 6 else ()

    def fill_in(self, manifest: str) -> str:
        """$dns, $control_plane and $address_type, which is the family as an EndpointSlice spells it."""
        addresses = {"dns": self.dns, "control_plane": self.control_plane, "address_type": f"IPv{self.version}"}
        return string.Template(manifest).substitute(addresses)

    def node(self, node: Node) -> str:
        return self._machine(10 + node.number)

    def pods_of(self, node: Node) -> str:
        """The part of the pods' network that is this node's."""
        whole = ipaddress.ip_network(self.pods)
        length = 24 if self.version == 4 else 64
        first = whole.network_address + node.number * 2 ** (whole.max_prefixlen - length)
        return f"{first}/{length}"

    def _machine(self, number: int) -> str:
        return str(ipaddress.ip_network(self.machines)[number])


IPV4 = Network("ipv4", "10.199.0.0/24", "10.244.0.0/16", "10.96.0.0/16", "10.96.0.10", "0.0.0.0/0")
IPV6 = Network("ipv6", "fd00:199::/64", "fd00:244::/48", "fd00:96::/112", "fd00:96::a", "::/0")
NETWORKS = {network.family: network for network in (IPV4, IPV6)}


def in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
