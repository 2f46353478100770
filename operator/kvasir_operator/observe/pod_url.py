"""Where a pod answers over HTTP."""


def pod_url(address: str, port: int, path: str) -> str:
    """`address`: the pod's, IPv4 or IPv6; `path` begins with a slash."""
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}{path}"
