"""`bothways convert | average | export | serve | play`: models for other programs and over HTTP."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

import bothways
from bothways.cli import options
from bothways.core.config import reader as configs
from bothways.core.config.values import require_at_least, require_range
from bothways.core.errors import ConfigError, FolderError, require
from bothways.core.files import check_not_input
from bothways.core.progress import terminal_progress
from bothways.core.terminal import listed, quantity, write_stderr
from bothways.hub import Format
from bothways.hub.convert import ModelPart
from bothways.hub.resolve import resolve_run


def convert(
    source: str,
    /,
    *,
    out: Path,
    part: ModelPart | None = None,
    vocabulary: Path | None = None,
) -> None:
    """Convert a TensorFlow checkpoint to a model folder, or a model to another vocabulary.

    Checkpoints are Google's of BERT, ALBERT or ELECTRA. TensorFlow is not needed.

    Parameters
    ----------
    source
        The unpacked folder of a checkpoint, or its .index file. With --vocabulary, a model folder,
        a Hub id, or the folder of a run.
    out
        The model folder.
    part
        The model of an ELECTRA checkpoint; by default the discriminator.
    vocabulary
        Add the words of a text file, one a line, or replace the vocabulary by that of a tokenizer:
        a folder, tokenizer.json or vocab.txt. New rows are the means of the old pieces; all rows
        are listed in vocabulary.tsv, next to the new weights.
    """
    if vocabulary is not None:
        if part is not None:
            message = "chooses a model of a TensorFlow checkpoint, and this is another vocabulary"
            raise ConfigError(message, where="part", fix="Leave it out: both models are converted.")
        from bothways.hub.convert.vocabulary import TABLE, convert_vocabulary

        with terminal_progress() as progress:
            change = convert_vocabulary(source, out, vocabulary, progress)
        for fate, count in change.counts.items():
            print(f"{fate}: {quantity(count, 'row(s)')}")
        table = Path(resolve_run(str(out)), TABLE)
        write_stderr(f"wrote {out}: {change.new.size:,} tokens; each row is in {table}")
        return
    folder = Path(source)
    check_not_input(out, [folder])
    is_model = Path(resolve_run(source), "config.json").is_file()
    if is_model and not (any(folder.glob("*.index")) or part):
        fix = "To change its vocabulary: --vocabulary FILE."
        raise FolderError("is a model folder already", where=source, fix=fix)
    from bothways.hub.convert.tensorflow import read_tensorflow
    from bothways.hub.model_card import Card
    from bothways.hub.model_folder import save_model

    checkpoint = read_tensorflow(folder, part)
    summary = "Converted from a TensorFlow checkpoint with `bothways convert`, without training."
    card = Card(f"{checkpoint.index.stem}, converted", summary)
    save_model(out, checkpoint.model, checkpoint.tokenizer, card=card)
    print(checkpoint.report)
    if checkpoint.tokenizer is None:
        message = "there is no vocab.txt and no single SentencePiece file next to the checkpoint"
        write_stderr(f"warning: {message}: the folder has no tokenizer")
    write_stderr(f"wrote {out}")


@options.documented_by(bothways.average)
def average(*models: Path, out: Path) -> None:
    """Save the mean of the weights of several models, or of all checkpoints of one run.

    Runs that began alike, such as seeds of one fine-tuning, and the last checkpoints of a run are
    often better together than each alone. Measure it: bothways evaluate OUT dev.tsv.
    """
    names = bothways.average(models, out)
    write_stderr(f"The mean of {quantity(len(names), 'model(s)')} is in {out}.")


@options.documented_by(bothways.export_model)
def export(
    folder: str,
    *settings: str,
    to: Literal[Format, "both"] = "onnx",
    out: Path,
    task: str | None = None,
    length: options.MaxLength = None,
    int8: str | None = None,
    limit: float | None = None,
    columns: options.DataColumns = options.DataColumns(),  # noqa: B008 – frozen
) -> None:
    """Write a model as a graph that onnxruntime, OpenVINO and browsers run.

    The graph takes any batch size and length. Nothing is written if its outputs differ from the
    model's.

    Parameters
    ----------
    settings
        Settings of the task, such as pooling=cls for embed.
    """
    with terminal_progress() as progress:
        result = bothways.export_model(
            folder,
            out,
            to,
            task=task,
            length=length,
            int8=int8,
            limit=limit,
            columns=columns.named,
            progress=progress,
            **options.settings_for(bothways.export_model, settings),
        )
    for name, size in result.sizes.items():
        print(f"{out / name}  {size / 2**20:,.1f} MiB")
    for comparison in result.comparisons:
        print(comparison)
    for runtime, report in result.int8.items():
        print(f"{runtime}: {report}")


PORTS = "[0, 65535]"  # 0 takes any port that is free
SERVER = ("uvicorn", "httptools", "orjson", "prometheus_client")
"""The packages of the server."""


def serve(  # noqa: PLR0913 – one option per question
    *models: str,
    host: str = "127.0.0.1",
    port: int = 8080,
    task: str | None = None,
    index: tuple[str, ...] = (),
    length: options.MaxLength = None,
    precision: options.Precision = "fp32",
    device: options.Device = "auto",
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
    require_at_least(1, threads=threads)
    require_at_least(0, drain_delay=drain_delay)
    require("serve", "bothways serve", *SERVER)
    import torch

    from bothways.serving import run
    from bothways.serving.errors import DEFAULT_LIMITS, Limits

    indexes = run.named_indexes(index)
    folders = run.named_models(models, task, indexes.values())
    limits = configs.load(Limits, base=DEFAULT_LIMITS, overrides=limit)
    keys = run.read_keys(api_key_file)
    if keys and no_auth:
        source = api_key_file or run.KEYS
        message = f"contradicts the keys of {source}, which clients would have to give"
        raise ConfigError(message, where="--no-auth", fix="Leave out one of the two.")
    host = host.strip("[]")  # as URLs have IPv6 addresses
    local = host in run.LOOPBACK
    require_range(PORTS, port=port)
    if not (local or keys or no_auth):
        message = f"{host} can be reached from the network, and there is no key"
        fix = "Give keys (--api-key-file FILE), or say --no-auth."
        raise ConfigError(message, where="host", fix=fix)
    start = time.perf_counter()
    with run.bind(host, port) as bound:
        if threads is not None:
            torch.set_num_threads(threads)
        application = run.open_app(
            folders, indexes, length=length, device=device, precision=precision, limits=limits,
            keys=keys, playground=local if play is None else play,
            hosts=allow_host or (run.LOOPBACK if local else None),
        )  # fmt: skip
        names = listed(f"{model.name} ({model.kind})" for model in application.models)

        def opened() -> None:
            """Print the address, now that the server answers."""
            loaded = f"loaded in {time.perf_counter() - start:.1f} s"
            run.print_line(f"serving {names} on {run.url_of(bound)}, {loaded}")

        run.run_server(
            application, bound, requests=log == "requests", delay=drain_delay, opened=opened
        )


def play(
    *models: str,
    port: int = 0,
    task: str | None = None,
    index: tuple[str, ...] = (),
    length: options.MaxLength = None,
    precision: options.Precision = "fp32",
    device: options.Device = "auto",
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
    import webbrowser

    require("serve", "bothways play", *SERVER)
    from bothways.serving import run

    require_range(PORTS, port=port)
    indexes = run.named_indexes(index)
    folders = run.named_models(models, task, indexes.values())
    with run.bind("127.0.0.1", port) as bound:
        application = run.open_app(
            folders, indexes, length=length, device=device, precision=precision,
            hosts=run.LOOPBACK, playground=True,
        )  # fmt: skip
        url = f"{run.url_of(bound)}/play"

        def opened() -> None:
            """Print the address, now that the server answers, and open it."""
            write_stderr(f"open {url} (Ctrl-C ends)")
            if not no_browser:
                threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

        run.run_server(application, bound, requests=False, opened=opened)
