"""The results of `sparq-cpp calibrate`: saved beside a model, found again, and applied to settings.

`MODEL.gguf.sparq.json`, or a file in the cache folder if that cannot be written, has the results of
several ratios, and a hash of the model's content. `resolve` replaces `budget=calibrated` or `top-p`
by these results, which `pyorch.calibrate` finds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyorch import paths
from pyorch.attention.spec import CALIBRATED, AttentionSpec, ratio_text, read_settings
from pyorch.errors import SparqError
from pyorch.models.content import content_hash

SCHEMA = 1
Settings = Mapping[str, Any]  # settings by name; lists are text, as in a line


# The result of a search: what it depends on, such as `ratio`, `shadow`, `n_pos`, and a hash of the
# `text`; `calibrated` and `top-p`, the best settings without `top_p`, and of all; and `candidates`,
# what was compared: its `kl` in nats, and `share`, the bytes read over dense attention's
Result = dict[str, Any]


def _files(model: Path, digest: str) -> list[Path]:
    beside = model.with_name(model.name + ".sparq.json")
    return [beside, paths.cache() / "calibrated" / f"{digest}.json"]


def load(model: str | os.PathLike[str]) -> list[Result]:
    """All results for this model, the newest of each ratio and shadow.

    Raises:
        SparqError: a file of results is damaged.
    """
    digest = content_hash(Path(model))
    results: dict[tuple[float, str], Result] = {}
    for file in _files(Path(model), digest):
        try:
            data = json.loads(file.read_text("utf-8"))
            fits = data["schema"] == SCHEMA and data["model"] == digest
            for r in data["results"] if fits else []:
                key = (round(r["ratio"], 9), r["shadow"])
                if key not in results or results[key]["time"] < r["time"]:
                    results[key] = r
        except OSError:
            continue
        except (ValueError, KeyError, TypeError):
            raise SparqError(f"{file} is damaged", "delete it, and calibrate again") from None
    return list(results.values())


def save(model: Path, result: Result) -> Path:
    """Keep a result with those of other ratios. Returns its file.

    Of two that are kept at the same moment, one may be lost.

    Raises:
        SparqError: neither the model's folder nor the cache folder can be written.
    """
    digest = content_hash(model)
    same = (result["ratio"], result["shadow"])
    others = [r for r in load(model) if (r["ratio"], r["shadow"]) != same]
    data = {"schema": SCHEMA, "model": digest, "results": [*others, result]}
    reason = ""
    for file in _files(model, digest):
        try:
            paths.put(file, json.dumps(data, indent=1) + "\n")
            return file
        except OSError as e:
            reason = f"{file}: {e.strerror or e}"
    raise SparqError(f"the result cannot be kept: {reason}", "SPARQ_CACHE names another folder")


def find(model: str | os.PathLike[str], ratio: float, shadow: str) -> Result:
    """The result for this ratio and type of the transposed K.

    Raises:
        SparqError: there is none.
    """
    results = load(model)
    for r in results:
        if abs(r["ratio"] - ratio) < 1e-9 and r["shadow"] == shadow:
            return r
    known = ", ".join(f"{ratio_text(r['ratio'])} ({r['shadow']})" for r in results)
    also = f"; there are results for {known}" if known else ""
    raise SparqError(
        f"{Path(model).name} is not calibrated for ratio {ratio_text(ratio)} ({shadow}){also}",
        f"sparq-cpp calibrate --model {model} --ratio {ratio_text(ratio)}",
    )


def resolve(spec: AttentionSpec, model: str | os.PathLike[str]) -> AttentionSpec:
    """Replace `budget=calibrated` or `top-p` by its settings for this model; keep other budgets.

    mean_v, min_k and local are the result's if the settings leave them open.

    Raises:
        SparqError: the model is not calibrated for the ratio, or the method is not sparq.
    """
    if spec.budget not in CALIBRATED:
        return spec
    if spec.method != "sparq":
        raise SparqError(f"budget {spec.budget} belongs to sparq", "-a sparq,calibrated", 2)
    result = find(model, spec.ratio or 0, spec.shadow)
    out = applied(result["calibrated"] if spec.budget == "calibrated" else result["top-p"], spec)
    own = {name: getattr(spec, name) for name in ("mean_v", "min_k", "local")}
    return replace(out, **{k: v for k, v in own.items() if v != getattr(AttentionSpec, k)})


def applied(settings: Settings, spec: AttentionSpec) -> AttentionSpec:
    """`spec` with these settings in place of its budget.

    Raises:
        SparqError: a setting that this version does not know, which would be left out otherwise.
    """
    parts = [f"{name}={value}" for name, value in settings.items()]
    values = read_settings(parts, "setting of the saved calibration")
    return replace(spec, budget="uniform", **values)
