"""TAB in bash and zsh, with the script that `bothways --install-completion` writes."""

import os
import pty
import re
import shutil
import subprocess

import pytest

from bothways.cli.main import app

SHELLS = {
    "bash": (["--norc", "--noprofile"], "source ./_cyclopts_bothways"),
    "zsh": (["-f"], "bindkey -e; fpath+=($PWD); autoload compinit; compinit -Du"),
}
"""Options without files of settings, and what loads the script in the folder."""
COMPLETED = {
    "bothways finet": "bothways|finetune|",
    "bothways pretrain corp": "bothways|pretrain|corpus.d|",
    "bothways finetune m trai": "bothways|finetune|m|train.tsv|",
    "bothways pretrain c --config fi": "bothways|pretrain|c|--config|first.toml|",
    "bothways pretrain c --out corp": "bothways|pretrain|c|--out|corpus.d|",
    "bothways finetune m t --dev de": "bothways|finetune|m|t|--dev|de v.tsv|",
}
"""The words of each line after TAB."""


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_commands_and_file_names(shell, tmp_path, monkeypatch):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "corpus.d").mkdir()
    for name in ("train.tsv", "first.toml", "de v.tsv"):
        (tmp_path / name).touch()
    script = f"--output={tmp_path / '_cyclopts_bothways'}"
    app(["--install-completion", f"--shell={shell}", script], result_action="return_value")
    master, slave = pty.openpty()
    environment = {**os.environ, "PS1": "", "TERM": "dumb", "INPUTRC": os.devnull}
    options, load = SHELLS[shell]
    # Ctrl-A and Ctrl-E: the words of the line are printed between two marks.
    lines = [f"{line}\t\x01printf '%s|' = \x05 =\n" for line in COMPLETED]
    typed = f"{load}\n{''.join(lines)}exit\n"
    with subprocess.Popen(
        [shell, *options, "-i"], cwd=tmp_path, env=environment,
        stdin=slave, stdout=slave, stderr=slave,
    ):  # fmt: skip
        os.close(slave)
        os.write(master, typed.encode())
        output = b""
        while chunk := _read(master):
            output += chunk
    os.close(master)
    printed = re.findall(r"=\|(.*?)=\|", output.decode().replace("/|", "|"))
    assert printed == [*COMPLETED.values()], output


def _read(terminal):
    try:
        return os.read(terminal, 2**16)
    except OSError:  # how Linux reports the end of a pseudo-terminal
        return b""
