"""TAB in bash and zsh, with the script that `bothways --install-completion` writes."""

import os
import pty
import shutil
import subprocess

import pytest

from bothways.cli.main import app

SHELLS = {
    "bash": (["--norc", "--noprofile"], "source ./_cyclopts_bothways"),
    "zsh": (["-f"], "bindkey -e; fpath+=($PWD); autoload compinit; compinit -Du"),
}
"""Options without files of settings, and what loads the script in the folder."""


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("bothways finet", "bothways|finetune|"),
        ("bothways pretrain corp", "bothways|pretrain|corpus.d"),
        ("bothways finetune m trai", "bothways|finetune|m|train.tsv|"),
        ("bothways pretrain c --config fi", "bothways|pretrain|c|--config|first.toml|"),
        ("bothways pretrain c --out corp", "bothways|pretrain|c|--out|corpus.d"),
        ("bothways finetune m t --dev de", "bothways|finetune|m|t|--dev|de v.tsv|"),
    ],
)
def test_tab_completes_commands_and_file_names(line, completed, shell, tmp_path, monkeypatch):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "corpus.d").mkdir()
    for name in ("train.tsv", "first.toml", "de v.tsv"):
        (tmp_path / name).touch()
    words = [
        "--install-completion",
        f"--shell={shell}",
        f"--output={tmp_path / '_cyclopts_bothways'}",
    ]
    app(words, result_action="return_value")
    master, slave = pty.openpty()
    environment = {**os.environ, "PS1": "", "TERM": "dumb", "INPUTRC": os.devnull}
    options, load = SHELLS[shell]
    typed = f"{load}\n{line}\t\x01printf '%s|' \nexit\n"  # Ctrl-A: prints the words of the line
    with subprocess.Popen(
        [shell, *options, "-i"],
        cwd=tmp_path,
        env=environment,
        stdin=slave,
        stdout=slave,
        stderr=slave,
    ):
        os.close(slave)
        os.write(master, typed.encode())
        output = b""
        while chunk := _read(master):
            output += chunk
    os.close(master)
    assert completed in output.decode()


def _read(terminal):
    try:
        return os.read(terminal, 2**16)
    except OSError:  # how Linux reports the end of a pseudo-terminal
        return b""
