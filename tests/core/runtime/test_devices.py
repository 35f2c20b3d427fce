import functools
import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from bothways.core.errors import ConfigError, ResourceError
from bothways.core.runtime import devices as hardware

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def cpu_of(monkeypatch):
    """Pretend to be a processor with these lines of /proc/cpuinfo and these probes of torch."""

    def pretend(line, **probes):
        monkeypatch.setattr(
            hardware, "read_system_file", lambda path: [line] if path == "/proc/cpuinfo" else []
        )
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_vnni_supported"):
            monkeypatch.setattr(
                torch.cpu, name, functools.partial(bool, probes.get(name)), raising=False
            )
        hardware._cpu_flags.cache_clear()

    yield pretend
    hardware._cpu_flags.cache_clear()


@pytest.mark.parametrize(("line", "probes", "bf16", "int8"), [
    ("flags\t\t: fpu avx512f avx512_bf16 amx_tile", {}, True, False),
    ("flags\t\t: fpu avx512f amx_bf16", {}, True, False),
    ("flags\t\t: fpu avx512f avx512_vnni", {}, False, True),
    ("flags\t\t: fpu avx2 avx_vnni", {}, False, True),
    ("flags\t\t: fpu amx_int8", {}, False, True),
    ("flags\t\t: fpu avx2 avx512f avx512bw", {}, False, False),
    ("Features\t: fp asimd bf16 i8mm", {}, True, False),
    ("Features\t: fp asimd", {}, False, False),
    ("", {"_is_avx512_bf16_supported": True}, True, False),
    ("", {"_is_amx_tile_supported": True}, True, False),
    ("", {"_is_vnni_supported": True}, False, True),
    ("", {}, False, False),
])  # fmt: skip
def test_instructions_are_looked_for_and_never_assumed(cpu_of, line, probes, bf16, int8):
    cpu_of(line, **probes)
    assert (hardware.has_bf16(CPU), hardware.has_int8(CPU)) == (bf16, int8)
    assert not hardware.has_int8(CUDA)
    assert hardware.resolve_precision("auto", CPU) is (torch.bfloat16 if bf16 else torch.float32)
    assert hardware.resolve_precision("fp32", CPU) is torch.float32


def test_a_torch_without_these_probes_is_asked_nothing(cpu_of, monkeypatch):
    cpu_of("flags : avx2")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name)
    assert not hardware.has_bf16(CPU)


def test_that_gpu_is_asked_which_is_meant(monkeypatch):
    """From Ampere on they multiply bf16; torch emulates it on older ones, and tells of the current one alone."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: (7, 5) if device.index == 1 else (8, 0)
    )
    assert hardware.has_bf16(CUDA)
    assert not hardware.has_bf16(torch.device("cuda:1"))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert hardware.has_bf16(torch.device("cuda:1"))


@pytest.mark.parametrize(("capability", "built", "hip", "expected"), [
    ((8, 0), True, None, True),
    ((8, 0), False, None, False),
    ((7, 5), True, None, False),
    ((8, 0), True, "6.0", False),
])  # fmt: skip
def test_where_torch_has_kernels_for_packed_sequences(
    capability, built, hip, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    monkeypatch.setattr(hardware, "installed", lambda name: built and name == "triton")
    for has_kernel in (hardware.has_varlen.__wrapped__, hardware.has_flex):
        assert has_kernel(CUDA) is expected
        assert not has_kernel(CPU)


def test_bf16_without_hardware_is_refused(monkeypatch):
    monkeypatch.setattr(hardware, "has_bf16", lambda device: True)
    assert hardware.resolve_precision("bf16", CPU) is torch.bfloat16
    monkeypatch.setattr(hardware, "has_bf16", lambda device: False)
    with pytest.raises(ConfigError, match="has no bf16 instructions") as caught:
        hardware.resolve_precision("bf16", CPU)
    assert caught.value.where == "precision"
    with pytest.raises(ConfigError, match="'bf17' is unknown: it must be auto, fp32 or bf16"):
        hardware.resolve_precision("bf17", CPU)
    assert hardware.describe_device(CPU) in caught.value.what


def test_a_device_is_chosen_by_name_or_by_what_there_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.choose_device() == hardware.choose_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert hardware.choose_device() == hardware.choose_device("cuda") == CUDA
    assert hardware.choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ResourceError, match="there is no 'cuda:2': torch sees 2 CUDA devices"):
        hardware.choose_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "mps", "", None])
def test_a_name_that_is_no_device_is_refused(name):
    with pytest.raises(ConfigError, match="auto, cpu, cuda or cuda:N"):
        hardware.choose_device(name)


def test_the_rate_of_matrix_products_is_measured_once():
    rate = hardware.gemm_rate(CPU, torch.float32, 0.05)
    assert 1e9 < rate < 1e15
    assert hardware.gemm_rate(CPU, torch.float32, 0.05) == rate


def test_memory_is_what_the_system_and_the_container_leave(monkeypatch, tmp_path):
    files = {"/proc/meminfo": ["MemTotal: 9000 kB", "MemAvailable:    4000 kB"]}
    monkeypatch.setattr(hardware, "read_system_file", lambda path: files.get(path, []))
    limits = list[int]()
    monkeypatch.setattr(hardware, "group_memory", lambda: limits)
    assert hardware.memory_available(CPU) == 4000 * 1024
    limits += [9000 * 1024, 2150]
    assert hardware.memory_available(CPU) == 2150
    files.clear()
    assert hardware.memory_available(CPU) == 2150
    limits.clear()
    assert hardware.memory_available(CPU) is None


def test_what_was_freed_and_kept_is_given_back_before(monkeypatch):
    given = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert hardware.memory_available(CUDA) == 123
    monkeypatch.setattr(hardware, "give_back", lambda device: given.append(device.type))
    hardware.memory_available(CPU)
    assert given == ["cuda", "cpu"]


def test_the_free_disk_is_that_of_a_folder_to_come(tmp_path):
    assert hardware.disk_free(tmp_path / "not" / "yet") == pytest.approx(
        hardware.disk_free(tmp_path), rel=0.1
    )


def test_the_machine_is_described(monkeypatch):
    assert torch.__version__ in hardware.describe_device(CPU)
    assert "cores" in hardware.describe_device(CPU)
    monkeypatch.setattr(hardware, "read_system_file", lambda path: ["model name\t: Some Processor"])
    assert hardware.describe_device(CPU).startswith("Some Processor, ")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert hardware.describe_device(CUDA) == f"Some GPU, torch {torch.__version__}"


def test_more_programs_are_compiled_in_each_thread(monkeypatch):
    """The limit of torch's compiler is a setting of the thread: predictors and backward passes have their own."""
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))

    def scaled(x: torch.Tensor, words: list[str]) -> torch.Tensor:
        return x * len(words)

    def run() -> None:
        for count in range(12):
            hardware.compiled(scaled)(torch.ones(3), ["a"] * count)

    hardware.compiled(scaled)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch._dynamo.reset()
    assert counter.frame_count == 12
