"""The image that holds a pod's namespaces open: one static program that waits, packed without a container engine."""

from e2e.cluster.rig.image import write_program_image
from e2e.cluster.rig.layout import IMAGES, PAUSE_IMAGE

SOURCE = """
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int signal) { exit(0); }
static void reap(int signal) { while (waitpid(-1, NULL, WNOHANG) > 0) {} }

int main(void) {
    signal(SIGINT, end);
    signal(SIGTERM, end);
    signal(SIGCHLD, reap);
    for (;;) pause();
}
"""


def write_pause_image() -> None:
    write_program_image(IMAGES / "pause.tar", PAUSE_IMAGE, SOURCE)
