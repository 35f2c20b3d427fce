"""TAB in bash, with the script that `bothways --install-completion` writes."""

import os
import pty
import shutil
import subprocess

import pytest

from bothways.cli.main import app

BASH = shutil.which("bash")


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("bothways finet", "bothways finetune "),
        ("bothways pretrain corp", "bothways pretrain corpus.d/"),
        ("bothways finetune m trai", "bothways finetune m train.tsv "),
        ("bothways pretrain c --config fi", "bothways pretrain c --config first.toml "),
        ("bothways pretrain c --out corp", "bothways pretrain c --out corpus.d/"),
        ("bothways finetune m t --dev=de", "bothways finetune m t --dev=de\\ v.tsv "),
    ],
)
def test_tab_completes_commands_and_file_names(line, completed, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "corpus.d").mkdir()
    for name in ("train.tsv", "first.toml", "de v.tsv"):
        (tmp_path / name).touch()
    script = tmp_path / "script"
    app(
        ["--install-completion", "--shell=bash", f"--output={script}"], result_action="return_value"
    )
    master, slave = pty.openpty()
    environment = {**os.environ, "PS1": "", "TERM": "dumb", "INPUTRC": os.devnull}
    command = [BASH, "--norc", "--noprofile", "-i"]
    typed = f"source {script}\n{line}\t\x01#\nexit\n"  # Ctrl-A #: the line is not run
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=slave, stdout=slave, stderr=slave
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
