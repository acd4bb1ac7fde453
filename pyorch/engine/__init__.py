"""Load a model, prefill, decode, generate: plain functions over one small session.

The command line, the server, the evaluations and the benchmarks share these functions, and none of
them adds to the mathematics. A session is one sequence of tokens; `session.tokens` are those whose
K and V are in its cache. (`parallel` decodes several sequences together.)

    with load("model.gguf", n_ctx=8192, attention="sparq,ratio=1/8") as s:
        for piece in generate(s, "Once upon a time", max_tokens=64):
            print(piece, end="", flush=True)

A model is loaded once, and makes as many sessions as the memory allows:

    with load_model("model.gguf") as model:
        dense, sparse = model.session(), model.session(attention="sparq,ratio=1/8")

Nothing here compiles: `sparq-cpp build` has to have built the library.
"""

from pyorch.engine.attention import info, measure_mass, reset_counters, set_attention
from pyorch.engine.c_functions import AttentionInfo
from pyorch.engine.decoding import align, decode, logits, prefill, rewind
from pyorch.engine.document import (
    Reading,
    begun,
    difference,
    keep_document,
    kept_path,
    make_room,
    must_be_kept_first,
    open_document,
    read_document,
    reading_of,
)
from pyorch.engine.document_file import Document, content
from pyorch.engine.generation import Piece, generate
from pyorch.engine.library import library
from pyorch.engine.loading import load, load_model
from pyorch.engine.model import Model, Session, Timings, Watcher
from pyorch.engine.parallel import decode_each, prefill_each, rewind_each
from pyorch.engine.sampling import Sampling
from pyorch.engine.settings import (
    DEFAULT_CTX,
    Placement,
    Rope,
    SessionOptions,
    cache_type,
    usable_cores,
)
from pyorch.engine.text import check_text, count_beyond, detokenize, is_eog, token_bytes, tokenize
from pyorch.ggml import NUMA
