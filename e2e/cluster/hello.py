"""The image that the rig's own tests run: a server of its pod's name, a client for it, and the machine's `getent`."""

import shutil

from e2e.cluster.rig.image import write_program_image
from e2e.cluster.rig.layout import IMAGES

HELLO = "kvasir.dev/hello:1"
SOURCE = """
#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void end(int signal) { exit(0); }

// hello: serve this pod's name on port 8080.   hello ADDRESS PORT PATH: print what is served there.
int main(int argc, char **argv) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(8080)};
    char text[512], name[128];
    int one = 1, connection = socket(AF_INET, SOCK_STREAM, 0);
    signal(SIGTERM, end);
    if (argc == 4) {
        at.sin_port = htons(atoi(argv[2]));
        inet_pton(AF_INET, argv[1], &at.sin_addr);
        if (connect(connection, (struct sockaddr *)&at, sizeof at)) return perror("connect"), 1;
        dprintf(connection, "GET %s HTTP/1.0\\r\\n\\r\\n", argv[3]);
        for (ssize_t got; (got = read(connection, text, sizeof text)) > 0;) fwrite(text, 1, got, stdout);
        return 0;
    }
    gethostname(name, sizeof name);
    int length = snprintf(text, sizeof text, "HTTP/1.0 200 OK\\r\\nContent-Length: %zu\\r\\n\\r\\n%s",
                          strlen(name), name);
    setsockopt(connection, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    bind(connection, (struct sockaddr *)&at, sizeof at);
    listen(connection, 16);
    for (;;) {
        int client = accept(connection, NULL, NULL);
        char request[512];
        if (read(client, request, sizeof request) < 0 || write(client, text, length) < 0) perror("client");
        close(client);
    }
}
"""


def write_hello_image() -> None:
    getent = shutil.which("getent")
    assert getent is not None
    write_program_image(IMAGES / "hello.tar", HELLO, SOURCE, getent)


def deployment(name: str, replicas: int, resources: dict[str, str] | None = None) -> dict[str, object]:
    labels = {"app": name}
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    container = {
        "name": "hello",
        "image": HELLO,
        "imagePullPolicy": "Never",
        "resources": {"limits": resources or {}},
        "readinessProbe": {"httpGet": {"port": 8080}, "periodSeconds": 1},
    }
    pod = {
        "containers": [container],
        "terminationGracePeriodSeconds": 1,
        "topologySpreadConstraints": [] if resources else [{**spread, "labelSelector": {"matchLabels": labels}}],
    }
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def service(name: str, selects: str = "", **spec: object) -> dict[str, object]:
    """Of the app of the same name, or of `selects`."""
    spec |= {"selector": {"app": selects or name}, "ports": [{"port": 80, "targetPort": 8080}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
