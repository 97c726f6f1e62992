"""What vLLM finds of this package: an entry point that does no harm wherever it is called."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types

import pytest

from paged_attn.integrations import vllm as plugin

REGISTRY = "vllm.v1.attention.backends.registry"


def test_entry_point() -> None:
    (found,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="paged_attn")
    assert found.load() is plugin.register


def test_without_vllm_nothing_happens() -> None:
    """Also nothing of vLLM is looked for before the entry point is called."""
    program = """
import sys
looked_for = []
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vllm":
            looked_for.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from paged_attn.integrations import vllm
assert not looked_for
assert vllm.register() is None
assert looked_for
assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]
assert "paged_attn.integrations._vllm_backend" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


class Member:
    """As vLLM's: a backend's place, taken or not."""

    def __init__(self, path: str | None = None) -> None:
        self.path = path

    def is_overridden(self) -> bool:
        return self.path is not None

    def get_path(self) -> str | None:
        return self.path


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The places of a registry that stands in for vLLM's."""
    members = types.SimpleNamespace(CUSTOM=Member(), CPU_ATTN=Member())
    registry = types.ModuleType(REGISTRY)
    registry.AttentionBackendEnum = members  # type: ignore[attr-defined]
    registry.register_backend = lambda member, path: setattr(member, "path", path)  # type: ignore[attr-defined]
    parts = REGISTRY.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(parts[end - 1]))
    monkeypatch.setitem(sys.modules, REGISTRY, registry)
    monkeypatch.delenv(plugin.CPU_VARIABLE, raising=False)
    return members


def test_only_custom_is_taken_unasked(places: types.SimpleNamespace) -> None:
    plugin.register()
    plugin.register()
    assert places.CUSTOM.path == "paged_attn.integrations._vllm_backend.CustomBackend"
    assert places.CPU_ATTN.path is None


def test_the_cpus_place_is_taken_on_demand(
    places: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.CPU_VARIABLE, "0")
    plugin.register()
    assert places.CPU_ATTN.path is None
    monkeypatch.setenv(plugin.CPU_VARIABLE, "1")
    plugin.register()
    assert places.CPU_ATTN.path == "paged_attn.integrations._vllm_backend.CpuBackend"


def test_another_plugins_place_is_left_alone(
    places: types.SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    places.CUSTOM.path = "another.Backend"
    plugin.register()
    assert places.CUSTOM.path == "another.Backend"
    assert "CUSTOM stays another.Backend" in caplog.text


@pytest.mark.parametrize("asked", ["0", "1"])
def test_another_vllm_is_left_alone(
    places: types.SimpleNamespace,
    asked: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever asked for the CPU's place is told that there is none."""
    monkeypatch.setenv(plugin.CPU_VARIABLE, asked)
    del places.CPU_ATTN
    plugin.register()
    assert places.CUSTOM.path is None
    assert ("its registry" in caplog.text) == (asked == "1")
