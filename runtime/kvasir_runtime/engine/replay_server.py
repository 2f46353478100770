"""Answers readers that missed KV events, from a thread of its own that sleeps until one asks.

A request is [start], 8 bytes big-endian; the answer a message [sequence, payload] for each batch from there on, then
[-1, nothing]. That is vLLM's replay; the empty frame that a REQ socket puts in front comes back in front.
"""

import logging
import threading

import zmq

from kvasir_runtime.engine.replay_buffer import ReplayBuffer

logger = logging.getLogger(__name__)

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
SLOW_READER_MILLISECONDS = 2000
"""For which one reader may keep others waiting before its replay is given up; it asks again."""


class ReplayServer:
    def __init__(self, socket: zmq.Socket[bytes], buffer: ReplayBuffer) -> None:
        """Takes the bound ROUTER over, and closes it when its context is terminated."""
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # or what a slow reader has no room for would be dropped unseen
        socket.setsockopt(zmq.SNDTIMEO, SLOW_READER_MILLISECONDS)
        self._socket = socket
        self._buffer = buffer
        self._thread = threading.Thread(target=self._serve, name="kv-event-replay", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _serve(self) -> None:
        try:
            while True:
                *envelope, start = self._socket.recv_multipart()
                self._answer(envelope, start)
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def _answer(self, envelope: list[bytes], start: bytes) -> None:
        if len(start) != SEQUENCE_BYTES:
            logger.warning("a replay of KV events was asked for with %d bytes; it takes 8, big-endian", len(start))
            return
        try:
            for sequence, payload in self._buffer.since(int.from_bytes(start, "big")):
                self._socket.send_multipart([*envelope, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload])
            self._socket.send_multipart([*envelope, END_OF_REPLAY, b""])
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError as error:  # it left, or does not read
            logger.info("a replay of KV events was given up: %s", error.strerror)
