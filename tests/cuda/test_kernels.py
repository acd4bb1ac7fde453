"""The CUDA kernels against the oracle: the tests of the CPU op, run on them.

What those tests ask for several numbers of threads is asked here of both orders of the emulator: a
result that depends on them, as the sum of a missing barrier would, fails.
"""

from __future__ import annotations

import test_attn
import test_mixed_kinds
import test_quant
import test_steps

for module in (test_attn, test_mixed_kinds, test_quant, test_steps):
    globals().update({name: f for name, f in vars(module).items() if name.startswith("test_")})
