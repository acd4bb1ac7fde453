"""The harness of the tests on a device, on one that is not there: what it computes is compared."""

from __future__ import annotations

from pathlib import Path

import cases
import fake_device
import pytest
from device import DeviceGgml
from test_steps import check_steps


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory, native_lib_dir: Path) -> DeviceGgml:
    library = fake_device.build(tmp_path_factory.mktemp("fake"), native_lib_dir)
    return DeviceGgml(native_lib_dir, str(library))


@pytest.mark.parametrize("case", [*cases.TYPICAL[:3], cases.QUANTISED[1]], ids=str)
def test_steps_run_there(case: cases.Case, fake: DeviceGgml) -> None:
    before = fake.n_computed
    check_steps(case, fake)
    assert fake.n_computed == before + 7
