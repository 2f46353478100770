"""What collects logs reads one object a message, whatever is in it; people read the same in a line."""

import json
import logging
import warnings
from collections.abc import Iterator

import pytest

from kvasir_logging import LogFormat, log_to_stderr

NAME = "kvasir.test_logging"


@pytest.fixture
def log_as(capsys: pytest.CaptureFixture[str]) -> Iterator[object]:
    """Everything is put back, so that no other test's log is written so."""
    root, level, handlers = logging.getLogger(), logging.getLogger().level, logging.getLogger().handlers[:]
    root.handlers.clear()
    yield log_to_stderr
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_message_of_several_lines_is_one_object_with_its_exception(log_as, capsys) -> None:
    log_as("info", "json")
    try:
        raise ValueError('no "such"\nfield')
    except ValueError:
        logging.getLogger(NAME).exception("%s: not applied\nagain in 5 s", "models/llama")
    [line] = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert (found["level"], found["logger"]) == ("error", NAME)
    assert found["message"] == "models/llama: not applied\nagain in 5 s"
    assert found["exception"].endswith('ValueError: no "such"\nfield')
    assert found["time"].endswith("+00:00")


def test_what_a_message_is_about_is_fields_of_its_object_or_stands_behind_the_text(log_as, capsys) -> None:
    fields = {"request_id": "router-7", "status": 404, "color_message": "of uvicorn's"}
    log_as("info", "json")
    logging.getLogger(NAME).info("there is no %s", "/v2", extra=fields)
    found = json.loads(capsys.readouterr().err)
    assert (found["request_id"], found["status"], found["message"]) == ("router-7", 404, "there is no /v2")
    assert "color_message" not in found
    log_as("info", "text")
    logging.getLogger(NAME).info("there is no %s", "/v2", extra=fields)
    assert capsys.readouterr().err.endswith(f" INFO {NAME}: there is no /v2 request_id=router-7 status=404\n")


def test_warnings_of_libraries_are_messages(log_as, capsys) -> None:
    log_as("info", "json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("will be removed", stacklevel=1)
    found = json.loads(capsys.readouterr().err)
    assert (found["level"], "will be removed" in found["message"]) == ("warning", True)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_is_less_severe_is_not_logged(log_format: LogFormat, log_as, capsys) -> None:
    log_as("warning", log_format)
    logging.getLogger(NAME).info("nothing of worth")
    assert capsys.readouterr().err == ""
