from __future__ import annotations

import os

import pytest

from lightning_ring.optim.engine import compiler


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory):
    """Compiled kernels of this session go to a folder of its own, one for all of xdist's workers;
    without a compiler the fused way is skipped."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_RING_CACHE", str(folder / "kernels"))
        yield


@pytest.fixture(autouse=True)
def skip_without_compiler(request: pytest.FixtureRequest) -> None:
    way = getattr(request.node, "callspec", None) and request.node.callspec.params.get("way")
    if isinstance(way, dict) and way.get("fused") and compiler.find_compiler() is None:
        pytest.skip("no C++ compiler on this machine")
