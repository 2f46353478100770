"""What collects logs reads one object a message, whatever is in it."""

import io
import json
import logging

from kvasir_operator.logs import JsonFormatter


def test_a_message_of_several_lines_is_one_object_with_its_exception() -> None:
    stream = io.StringIO()
    handler, logger = logging.StreamHandler(stream), logging.getLogger("kvasir_operator.test_logs")
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    try:
        raise ValueError('no "such"\nfield')
    except ValueError:
        logger.exception("%s: not applied\nagain in 5 s", "models/llama")
    [line] = stream.getvalue().splitlines()
    found = json.loads(line)
    assert (found["level"], found["logger"]) == ("error", "kvasir_operator.test_logs")
    assert found["message"] == "models/llama: not applied\nagain in 5 s"
    assert found["exception"].endswith('ValueError: no "such"\nfield')
    assert found["time"].endswith("+00:00")
