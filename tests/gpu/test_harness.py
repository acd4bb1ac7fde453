"""The harness of the tests on a device, on one that is not there: it compares, and it can fail."""

from __future__ import annotations

from pathlib import Path

import cases
import compare
import fake_device
import pytest
from device import DeviceGgml, nmse


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory, native_lib_dir: Path) -> DeviceGgml:
    library = fake_device.build(tmp_path_factory.mktemp("fake"), native_lib_dir)
    return DeviceGgml(native_lib_dir, str(library))


@pytest.mark.parametrize("case", [*cases.TYPICAL[:3], cases.QUANTISED[1]], ids=str)
def test_compares(case: cases.Case, fake: DeviceGgml) -> None:
    before = fake.n_computed
    assert compare.compare(fake, case) == 5 and fake.n_computed == before + 5


def test_sees_a_difference(fake: DeviceGgml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "LIMIT", -1.0)
    with pytest.raises(AssertionError, match="logits"):
        compare.compare(fake, cases.TYPICAL[0])


def test_a_refusal_skips(fake: DeviceGgml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_REFUSE", "2")
    with pytest.raises(pytest.skip.Exception, match="sub-operation 2"):
        compare.compare(fake, cases.TYPICAL[0])


def test_nmse() -> None:
    import numpy as np

    x = np.array([1.0, -np.inf, 2.0])
    assert nmse(x, x) == 0 and nmse(x * [1.1, 1, 1], x) == pytest.approx(0.01 / 5)
    with pytest.raises(AssertionError):
        nmse(np.array([1.0, 0.0, 2.0]), x)
