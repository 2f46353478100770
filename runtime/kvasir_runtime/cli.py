"""`kvasir-runtime serve MODEL`: bind the port, fetch the model where it lies elsewhere, start the engine core, serve
until told to stop. Or `run-batch`, which answers a file, or `fetch` a model alone.

The port is bound before anything heavy starts, so that a port in use is an error of the first second. The engine core
is a child process; API processes beyond the first are children too, and share the listening socket.
"""

import argparse
import dataclasses
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvasir_logging import log_to_stderr
from kvasir_runtime import __version__
from kvasir_runtime.config import RuntimeConfig
from kvasir_runtime.config_checks import check_values
from kvasir_runtime.engine.core_process import running_engine_cores
from kvasir_runtime.errors import ConfigurationError, FetchError, KvasirRuntimeError
from kvasir_runtime.flags import HelpFormatter, Parser, add_flags, config_from
from kvasir_runtime.model_sources.command import add_fetch_arguments, fetched, run_fetch
from kvasir_runtime.server.batch_command import BatchFiles, add_batch_arguments, batch_files, for_a_batch, run_batch
from kvasir_runtime.server.launch import listen, run_api_server
from kvasir_runtime.server.processes import run_api_processes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="kvasir-runtime", description="Kvasir's inference engine behind an OpenAI-compatible API")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    usage = "kvasir-runtime serve MODEL [OPTION ...]"
    add_flags(commands.add_parser("serve", help="serve a model", usage=usage, formatter_class=HelpFormatter))
    batch = commands.add_parser(
        "run-batch",
        help="answer a file of requests",
        usage="kvasir-runtime run-batch MODEL -i FILE -o FILE [OPTION ...]",
        formatter_class=HelpFormatter,
    )
    add_batch_arguments(batch)
    add_flags(batch)
    add_fetch_arguments(commands.add_parser("fetch", help="download a model", formatter_class=HelpFormatter))
    namespace = parser.parse_all(sys.argv[1:] if arguments is None else arguments)
    log_to_stderr(namespace.log_level, namespace.log_format)
    try:
        sys.exit(_run(namespace))
    except ConfigurationError as error:
        parser.exit(2, f"kvasir-runtime: error: {error}\n")
    except FetchError as error:
        parser.exit(1, error.last_words)
    except KvasirRuntimeError as error:
        parser.exit(1, f"kvasir-runtime: error: {error}\n")
    except KeyboardInterrupt:  # before anything listens for it
        sys.exit(128 + signal.SIGINT)


def _run(namespace: argparse.Namespace) -> int:
    match namespace.command:
        case "fetch":
            return run_fetch(namespace)
        case "run-batch":
            return answer_batch(config_from(namespace), batch_files(namespace))
        case _:
            return serve(config_from(namespace))


def answer_batch(config: RuntimeConfig, files: BatchFiles) -> int:
    """Exit status: 0 once every line has an answer."""
    check_values(config)
    config = with_model(for_a_batch(config, files.num_at_once))
    with (
        listen(config.server.host, config.server.port) as listener,
        tempfile.TemporaryDirectory(prefix="kvasir-") as folder,
        running_engine_cores(config, Path(folder)),
    ):
        return run_batch(config, listener, Path(folder), files)


def serve(config: RuntimeConfig) -> int:
    """Exit status: 0 after a clean stop, 1 when the engine core or an API process failed."""
    check_values(config)
    if config.parallel.node_rank > 0:
        from kvasir_runtime.ranks.node import serve_node  # numpy and more: not for API processes

        return serve_node(with_model(config))
    with listen(config.server.host, config.server.port) as listener:
        config = with_model(config)
        with tempfile.TemporaryDirectory(prefix="kvasir-") as folder, running_engine_cores(config, Path(folder)):
            if config.server.api_server_count == 1:
                return run_api_server(config, 0, [listener], Path(folder))
            return run_api_processes(config, listener, Path(folder))


def with_model(config: RuntimeConfig) -> RuntimeConfig:
    """With the folder of its checkpoint."""
    model = fetched(config.model)
    if not (Path(model.model) / "config.json").is_file():
        seen = "has no config.json" if Path(model.model).exists() else "does not exist"
        raise ConfigurationError(
            f"MODEL is {model.model}, which {seen}; give the folder of a Hugging Face checkpoint, or where "
            "to download it from, as hf://ORG/NAME"
        )
    return dataclasses.replace(config, model=model)
