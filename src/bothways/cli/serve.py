"""`bothways serve`: models over HTTP; `bothways play`: a page in the browser to try them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from bothways.cli.options import Device, MaxLength, Precision

LAST_PORT = 65535
"""A port is a number of 16 bits."""


def serve(  # noqa: PLR0913 – one option per question
    *models: str,
    host: str = "127.0.0.1",
    port: int = 8080,
    task: str | None = None,
    index: tuple[str, ...] = (),
    length: MaxLength = None,
    precision: Precision = "fp32",
    device: Device = "auto",
    limit: tuple[str, ...] = (),
    api_key_file: Path | None = None,
    no_auth: Annotated[bool, Parameter(negative="")] = False,
    allow_host: tuple[str, ...] = (),
    drain_delay: float = 0.0,
    threads: int | None = None,
    log: Literal["requests", "errors"] = "requests",
    play: bool | None = None,
) -> None:
    """Serve models over HTTP, compatible with OpenAI, TEI, Hugging Face and Jina.

    One process answers for every task. Requests are computed in batches, and in fp32 every answer
    is that of `bothways predict`, whatever else is requested at the time. GET /info lists models
    and limits, /metrics counts, /openapi.json describes the routes. Ctrl-C finishes what is under
    way and ends; twice ends at once.

    Parameters
    ----------
    models
        FOLDER or NAME=FOLDER, one or several: a fine-tuned model folder, a sentence-transformers
        folder, the folder of a run, or a Hub id. Without a name it is the folder's. FOLDER:TASK
        serves it for a task, such as rank=my-model:rerank.
    host
        The address to listen on; the default can be reached from this machine alone. Any other
        needs keys, or --no-auth.
    port
        The port; 0 takes any that is free, and prints it.
    task
        The task of all models without one, such as fill or embed; default: each model's own.
    index
        FOLDER or NAME=FOLDER of an index that /search answers from, repeatable; the model that made
        it has to be served. Without models it is.
    limit
        NAME=VALUE, repeatable: body_bytes, texts, text_characters, request_characters,
        request_tokens, queue_tokens, batch_tokens, connections, head_seconds, body_seconds,
        deadline_seconds, drain_seconds.
    api_key_file
        A file with keys, one a line, of which clients give one: Authorization: Bearer KEY.
        Default: the variable BOTHWAYS_API_KEY, if it is set.
    no_auth
        Listen on an address of the network without keys.
    allow_host
        A name in the header Host that is answered, repeatable. Default: on 127.0.0.1 localhost and
        its addresses, else all.
    drain_delay
        Seconds between a signal to stop, when /ready begins to fail, and the end of accepting
        connections.
    threads
        Threads that compute; default: all cores.
    log
        requests: a JSON line on standard error for each request, without its text; errors: only
        for those that fail.
    play
        Serve the page /play to try the models, and the route /explain; by default only on the
        addresses of this machine.
    """
    import time

    from bothways.core.config import reader as configs
    from bothways.core.config.values import require_at_least
    from bothways.core.terminal import listed

    require_at_least(1, threads=threads)
    require_at_least(0, drain_delay=drain_delay)
    require_server("bothways serve")
    import torch

    from bothways.serving import run
    from bothways.serving.errors import DEFAULT_LIMITS, Limits

    indexes = run.named_indexes(index)
    folders = run.named_models(models, task, indexes.values())
    limits = configs.load(Limits, base=DEFAULT_LIMITS, overrides=limit)
    keys = tuple(os.environ.get("BOTHWAYS_API_KEY", "").split())
    if api_key_file is not None:
        keys = run.read_keys(api_key_file)
    local = host in ("127.0.0.1", "localhost", "::1")
    check_address(host, port, open_to_all=not (local or keys or no_auth))
    deployment = run.Deployment(
        folders, length, device, precision, limits, keys,
        hosts=tuple(name.lower() for name in allow_host) or (run.LOOPBACK if local else None),
        requests=log == "requests", delay=drain_delay,
        playground=local if play is None else play, indexes=indexes,
    )  # fmt: skip
    start = time.perf_counter()
    with run.bind(host, port) as bound:
        if threads is not None:
            torch.set_num_threads(threads)
        application = deployment.app()
        names = listed(f"{model.name} ({model.kind})" for model in application.models)

        def opened() -> None:
            """Print the address, now that the server answers."""
            loaded = f"loaded in {time.perf_counter() - start:.1f} s"
            run.print_line(f"serving {names} on {run.url_of(bound)}, {loaded}")

        run.run_server(application, bound, deployment, opened=opened)


def play(
    *models: str,
    port: int = 0,
    task: str | None = None,
    index: tuple[str, ...] = (),
    length: MaxLength = None,
    precision: Precision = "fp32",
    device: Device = "auto",
    no_browser: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Try models in the browser: predictions as pictures, tokens, and why.

    The page comes from this machine alone and can be reached from this machine alone. Ctrl-C ends
    it.

    Parameters
    ----------
    models
        FOLDER or NAME=FOLDER, one or several: a fine-tuned model folder, a sentence-transformers
        folder, the folder of a run, or a Hub id. Without a name it is the folder's.
    port
        The port; 0 takes any that is free.
    task
        The task of all models, such as fill or embed; default: each model's own.
    index
        FOLDER or NAME=FOLDER of an index to search, as for bothways serve; repeatable.
    no_browser
        Only print the address.
    """
    import sys
    import threading
    import webbrowser

    require_server("bothways play")
    from bothways.serving import run

    check_address("127.0.0.1", port, open_to_all=False)
    indexes = run.named_indexes(index)
    deployment = run.Deployment(
        run.named_models(models, task, indexes.values()),
        length,
        device,
        precision,
        hosts=run.LOOPBACK,
        requests=False,
        playground=True,
        indexes=indexes,
    )
    with run.bind("127.0.0.1", port) as bound:
        application = deployment.app()
        url = f"{run.url_of(bound)}/play"
        print(f"open {url} (Ctrl-C ends)", file=sys.stderr, flush=True)
        if not no_browser:
            bound.listen()  # a browser that is quicker than the server waits
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        run.run_server(application, bound, deployment)


def require_server(purpose: str) -> None:
    """Check that the packages of the server are installed; errors as `core.errors.require`."""
    from bothways.core.errors import require

    require("serve", purpose, "uvicorn", "httptools", "orjson", "prometheus_client")


def check_address(host: str, port: int, *, open_to_all: bool) -> None:
    """Refuse a port that is none, and an address that is open to all."""
    from bothways.core.errors import ConfigError

    if not 0 <= port <= LAST_PORT:
        message = f"must be from 0 to {LAST_PORT}, not {port}"
        raise ConfigError(message, where="port", fix="0 takes any port that is free.")
    if open_to_all:
        message = f"{host} can be reached from the network, and there is no key"
        fix = "Give keys (--api-key-file FILE), or say --no-auth."
        raise ConfigError(message, where="host", fix=fix)
