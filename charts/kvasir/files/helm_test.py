"""What `helm test` runs in a pod, as the operator's ServiceAccount: an operator is ready, services can be listed.

    python3 helm_test.py READYZ_URL [NAMESPACE...]      no namespace: the whole cluster is asked

Ends with status 1 and the refusal's own words when one of them fails.
"""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path(os.environ.get("SERVICE_ACCOUNT_FOLDER", "/var/run/secrets/kubernetes.io/serviceaccount"))
SERVICES = "/apis/serving.kvasir.dev/v1alpha1{scope}/inferenceservices?limit=1"
SECONDS = 30


def main(readyz_url: str, *namespaces: str) -> None:
    print(f"the operator is ready: {get(readyz_url)}")
    for scope in [f"/namespaces/{namespace}" for namespace in namespaces] or [""]:
        listed = json.loads(get(api_server() + SERVICES.format(scope=scope), with_token=True))
        print(f"the API server lists {listed['kind']}{scope}")


def api_server() -> str:
    host = os.environ["KUBERNETES_SERVICE_HOST"]
    bracketed = f"[{host}]" if ":" in host else host
    return f"https://{bracketed}:{os.environ['KUBERNETES_SERVICE_PORT']}"


def get(url: str, with_token: bool = False) -> str:
    request, context = urllib.request.Request(url), None
    if with_token:
        request.add_header("Authorization", f"Bearer {(ACCOUNT / 'token').read_text()}")
        context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    try:
        with urllib.request.urlopen(request, timeout=SECONDS, context=context) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        sys.exit(f"{url} answered {error.code}: {error.read().decode()}")
    except urllib.error.URLError as error:
        sys.exit(f"{url} did not answer: {error.reason}")


if __name__ == "__main__":
    main(*sys.argv[1:])
