"""What is freed is kept, and what is taken lies in large pages."""

import functools
import multiprocessing
import platform
import resource
from pathlib import Path

import pytest
import torch

from bothways.core.runtime import process
from bothways.core.runtime.process import give_back, tune_allocator
from toy_training import processes

glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc has these settings"
)


def elsewhere(function, *arguments):
    """What a function tells a connection in a process of its own, whose allocator nobody has touched."""
    ours, theirs = multiprocessing.Pipe()
    process = processes().Process(target=function, args=(theirs, *arguments))
    process.start()
    theirs.close()  # or a process that fails would be waited for
    told = ours.recv()
    process.join()
    return told


def faults_of_large_arrays(connection):
    """Page faults of 5 arrays of 48 MiB, one after the other: before, and with what they free kept."""

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            torch.ones(12 * 2**20)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    connection.send((faults(), tune_allocator(), faults(), faults()))


@glibc
def test_memory_that_is_kept_costs_no_page_faults():
    given_back, kept, _, again = elsewhere(faults_of_large_arrays)
    assert kept
    assert given_back > 2_500
    assert again < given_back / 20


def test_an_allocator_without_the_setting_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: object())
    assert tune_allocator.__wrapped__() is False


def asks_for_large_pages(array):
    """Whether the kernel is asked to make the middle of an array of large pages."""
    address, inside = array.data_ptr() + array.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(each, 16) for each in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return "hg" in rest
    raise AssertionError(f"nothing lies at {address}")


def large_pages(connection, limited):
    """Of an array before, after, after all was given back, and after once more; under a limit of this process."""
    if limited:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (2**33, most))
    asked = []
    returned = functools.partial(give_back, torch.device("cpu"))
    for step in (int, tune_allocator, returned, tune_allocator):
        step()
        asked.append(asks_for_large_pages(torch.ones(2**22)))
    connection.send(asked)


@glibc
@pytest.mark.skipif(
    process._OVERCOMMIT.exists() and process._is_counted(),
    reason="memory counts when it is asked for",
)
def test_what_is_taken_lies_in_large_pages():
    assert elsewhere(large_pages, False) == [False, True, True, True]


@glibc
def test_nothing_is_asked_for_that_counts_at_once():
    assert elsewhere(large_pages, True) == [False] * 4


def allocations(connection):
    """Build a model and predict with it; which settings of the allocator were asked for."""
    from bothways.core.batch import Batch, Layout
    from bothways.model.config import EncoderConfig
    from bothways.model.heads import LabelHead
    from bothways.model.model import Model

    model = Model(EncoderConfig(9, 8, 1, 1, 8), (LabelHead(2),)).eval()
    ids = torch.tensor([1, 2, 3])
    model.read("labels", Batch(ids, ids * 0, Layout.of([3])))
    connection.send(tune_allocator.cache_info().currsize)


def test_a_model_that_is_built_and_read_changes_no_setting_of_the_process():
    assert elsewhere(allocations) == 0
