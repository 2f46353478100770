"""`kvasir-runtime run-batch` as a process: each line has its answer, whatever the line is."""

import json
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.plain_http import CLIENT
from tests.runtime.cli.conftest import PROGRAM, Server

COMPLETIONS = "/v1/completions"


def request(custom_id: str, url: str = COMPLETIONS, method: str = "POST", **body: Any) -> str:
    asked = {"prompt": "hello", "max_tokens": 4, "temperature": 0} if url == COMPLETIONS else {}
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": asked | body})


def started(model_folder: Path, requests: Path, answers: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [PROGRAM, "run-batch", str(model_folder), "-i", str(requests), "-o", str(answers), "--device", "cpu", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )


def test_each_line_is_answered_as_a_request_is(model_folder: Path, tmp_path: Path, plain_server: Server) -> None:
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    many = [request(f"many-{number}", prompt=f"number {number}") for number in range(40)]
    lines = [
        request("whole", n=2, max_tokens=7, logprobs=1),
        "",
        request("refused", max_tokens=0),
        request("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}]),
        request("vectors", "/v1/embeddings", input="hi"),
        request("streamed", stream=True),
        request("elsewhere", "/v1/files"),
        request("got", method="GET"),
        "{nonsense",
        '{"custom_id": "no body", "method": "POST", "url": "/v1/completions"}',
        request("whole"),
        *many,
    ]
    requests.write_text("\n".join(lines))
    process = started(model_folder, requests, answers, "--dtype", "float32", "--requests-at-once", "8")
    log = process.communicate()[1]
    assert process.returncode == 0, log
    assert "50 lines answered" in log
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len({each["id"] for each in found}) == len(found) == 50
    assert all(set(each) == {"id", "custom_id", "response", "error"} for each in found)
    by_id = {each["custom_id"]: each for each in found if each["error"] is None}

    for line in (lines[0], *many):
        asked = json.loads(line)
        answer = by_id[asked["custom_id"]]["response"]
        expected = CLIENT.post(plain_server.url + COMPLETIONS, json=asked["body"]).json()
        assert (answer["status_code"], bool(answer["request_id"])) == (200, True)
        assert [choice["text"] for choice in answer["body"]["choices"]] == [c["text"] for c in expected["choices"]]
        assert answer["body"]["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    for name, param in (("refused", "max_tokens"), ("chat", "messages")):
        answer = by_id[name]["response"]
        assert (answer["status_code"], answer["body"]["error"]["param"]) == (400, param)
    assert "--runner" in by_id["vectors"]["response"]["body"]["error"]["message"]

    errors = [(each["custom_id"], each["error"]["code"]) for each in found if each["response"] is None]
    assert sorted(errors, key=str) == sorted(
        [
            ("streamed", "invalid_line"),
            ("elsewhere", "invalid_url"),
            ("got", "invalid_line"),
            (None, "invalid_line"),
            ("no body", "invalid_line"),
            ("whole", "duplicate_custom_id"),
        ],
        key=str,
    )
    [nonsense] = [each["error"]["message"] for each in found if each["custom_id"] is None]
    assert nonsense.startswith("line 9 is no request")


def test_a_batch_that_is_stopped_keeps_what_it_has_under_another_name(model_folder: Path, tmp_path: Path) -> None:
    requests, answers, partial = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    requests.write_text("\n".join(request(str(number), max_tokens=400) for number in range(5000)))
    process = started(model_folder, requests, answers)
    while process.poll() is None and not (partial.exists() and partial.stat().st_size):
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    process.send_signal(signal.SIGTERM)
    log = process.communicate(timeout=60)[1]
    assert process.returncode == 1, log
    assert "the batch ended early: it was stopped" in log
    assert not answers.exists()
    assert all(json.loads(line)["response"]["status_code"] == 200 for line in partial.read_text().splitlines())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-i", "missing", "-o", "out"], "--input-file is missing, which is no file"),
        (["-i", "FILE", "-o", "nowhere/out"], "nowhere is no folder"),
        (["-i", "FILE", "-o", "out", "--requests-at-once", "0"], "--requests-at-once is 0"),
        (["-i", "FILE"], "the following arguments are required: -o/--output-file"),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(
    model_folder: Path, tmp_path: Path, flags: list[str], message: str
) -> None:
    (tmp_path / "FILE").write_text("")
    done = subprocess.run(
        [PROGRAM, "run-batch", str(model_folder), *flags], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
