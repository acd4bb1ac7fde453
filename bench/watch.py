"""A second context of a loaded model, in which a function sees the tensors as they are computed."""

from __future__ import annotations

from collections.abc import Callable

from pyorch import engine
from pyorch.errors import SparqError
from pyorch.native.tensor import Tensor

See = Callable[[Tensor, bool], bool]


class Watched:
    """`watched.session` calls `see(tensor, ask)`: asked, it says whether it wants to see the tensor
    (all up to it are then computed, and it is called again, not asked); its errors come out of
    `check`."""

    def __init__(
        self,
        session: engine.Session,
        see: See,
        *,
        n_ctx: int,
        n_threads: int,
        n_batch: int = 512,
        flash_attn: bool = True,
    ) -> None:
        lib = session.lib
        self._see = see
        self._error: BaseException | None = None
        self._callback = lib.ggml_backend_sched_eval_callback(self._call)  # kept alive with us
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = min(n_batch, n_ctx)
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = int(flash_attn)
        params.cb_eval = self._callback
        ctx = lib.llama_init_from_model(session.model, params)
        if not ctx:
            raise SparqError(f"{session.path}: cannot make a context of {n_ctx} positions")
        self.session = engine.Session(lib, session.path, session.geometry, session.model, ctx)
        self.session.model = None  # not ours to free

    def _call(self, address: int, ask: bool, _data: object) -> bool:
        try:  # an exception cannot pass through C
            return self._see(Tensor.from_address(address), ask)
        except BaseException as error:  # noqa: BLE001
            self._error = self._error or error
            return not ask

    def check(self) -> None:
        """Raise what went wrong in `see` since the last time."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        self.session.close()
