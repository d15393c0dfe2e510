"""Try a query: needs, and inputs (random values, JSON, an .npy, .npz or picture file); the decision, the answer and its cost, or
the refusal with what to do about it.
"""

import json
import secrets
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import streamlit as st

from bus.messages.catalog import TensorSpec
from dashboard import formats, inputs, widgets
from dashboard.store import NoData, ask, classes_of, explain, query
from infaas.answers import Answer
from infaas.errors import BadInput, Refused

RANDOM, TEXT, FILE = "Random values", "JSON", "File or picture"
DONE = "tried"  # key of the session: what became of the last query
MAX_SCORES = 10  # of an item, the best first

widgets.page_title("Try a query", "Sends one query. It counts and costs like any other.")
app = widgets.choose_app(None)


def signature() -> tuple[list[TensorSpec], list[TensorSpec]]:
    """What the app takes and gives; nothing is known of an app without a model."""
    rows = query("signature", app=app)
    if rows.empty:
        return [], []
    given, got = (msgspec.convert(each or [], list[TensorSpec]) for each in rows.iloc[0][["inputs", "outputs"]])
    return given, got


def choose_inputs(specs: list[TensorSpec]) -> dict[str, Any] | None:
    """Show the controls for the inputs. None: there are none yet. Raises BadInput."""
    if specs:
        st.caption(f"{app} takes {inputs.takes(specs)}; n is the number of items.")
    options = [RANDOM, TEXT, FILE] if specs else [TEXT]
    how = FILE  # neither random values nor JSON are the bytes of a picture
    if not any(spec.binary for spec in specs):
        how = st.segmented_control("Inputs", options, default=options[0], required=True, key="how")
    if how == RANDOM:
        seed = st.session_state.setdefault("seed", 0)
        st.caption("One item of random values. It tests the way to the model and back; the answer has no meaning.")
        return inputs.made_up(specs, seed)
    if how == TEXT:
        text = st.text_area(
            "JSON",
            inputs.example(specs),
            key=f"json-{app}",
            placeholder="[[0.1, 0.2, …]]: a list of items; for several inputs a map of names to lists",
            height=120,
        )
        return inputs.from_json(text, specs) if text.strip() else None
    whole = len(specs) == 1 and specs[0].binary  # a file is an item as it is
    endings = [*inputs.ARRAYS, *(inputs.PICTURES if inputs.takes_picture(specs) else ())]
    file = st.file_uploader("File", None if whole else endings, key=f"file-{app}")
    if file is None:
        return None
    ending = file.name.rpartition(".")[2].lower()
    if whole and ending not in inputs.ARRAYS:
        return {specs[0].name: [file.getvalue()]}
    if ending in inputs.PICTURES:
        return _picture(file.getvalue(), specs)
    return inputs.from_file(file.name, file.getvalue(), specs)


def _picture(data: bytes, specs: list[TensorSpec]) -> dict[str, Any]:
    """Show how the picture becomes numbers, and what the model sees."""
    values = "0 to 255"
    with st.container(horizontal=True, vertical_alignment="bottom"):
        if specs[0].datatype.startswith(("FP", "BF")):
            values = st.selectbox(
                "Values",
                list(inputs.VALUES),
                key="values",
                bind="query-params",
                width=220,
                help="As the model was trained. " + "; ".join(f"{name}: {how}" for name, how in inputs.VALUES.items()),
            )
        invert = st.toggle("Swap bright and dark", key="invert", bind="query-params")
    arrays, seen = inputs.from_picture(data, specs, values, invert=invert)
    height, width = seen.shape[:2]
    kind = "colour" if seen.ndim == 3 else "grey"
    st.image(seen, f"What the model sees: {width} x {height} pixels, {kind}", width=min(max(width, 140), 320))
    return arrays


def send(arrays: dict[str, Any], needs: dict[str, Any]) -> None:
    """Ask, and keep what became of it for this visitor. The decision is that of the moment before."""
    assert app is not None
    trace = secrets.token_hex(16)
    done: dict[str, Any] = {"app": app, "trace": trace}
    try:
        done["decision"] = explain(app, needs)
        with st.spinner("Waits for the answer. A model that has to be loaded first takes some seconds."):
            done["answer"] = ask(app, arrays, needs, f"00-{trace}-{secrets.token_hex(8)}-01")
    except Refused as refused:
        done["refused"] = refused
    except BadInput as error:
        done["wrong"] = str(error)
    st.session_state[DONE] = done


def show_done(done: dict[str, Any]) -> None:
    if "wrong" in done:
        st.error(f"**Not sent:** {done['wrong']}.", icon=":material/block:")
        return
    if "refused" in done:
        refused: Refused = done["refused"]
        meaning = widgets.MEANING.get(refused.code, "")
        st.error(
            f"**Refused, {refused.code}:** {refused.message}.{widgets.alternative(refused)}", icon=":material/block:"
        )
        if meaning:
            st.caption(f"{refused.code}: {meaning}.")
    else:
        _answer(done["answer"])
    if decision := done.get("decision"):
        with st.expander("The decision, a moment before", icon=":material/quiz:"):
            widgets.show_verdict(decision)
            others = pd.DataFrame([each for each in decision.get("candidates") or [] if each["why_not"]])
            if len(others):
                qualities, accuracy = widgets.quality(others.assign(app=app))
                widgets.table(
                    others.assign(accuracy=qualities),
                    {
                        "variant": "variant",
                        "why_not": "why not",
                        "accuracy": accuracy,
                        "latency_ms": widgets.number_column("latency ms"),
                    },
                    "others",
                )


def _answer(answer: Answer) -> None:
    if answer.missed:
        st.warning(
            f"Answered, but these needs were not met: **{', '.join(answer.missed)}**.", icon=":material/warning:"
        )
    with st.container(horizontal=True, gap="small"):
        widgets.metric(
            "Latency, ms",
            formats.number(answer.latency_ms),
            f"{formats.number(answer.queue_ms)} waiting, {formats.number(answer.compute_ms)} computing",
        )
        widgets.metric(
            "Cost, US$/1,000",
            formats.number(1e3 * answer.cost),
            "from the cache" if answer.cached else "charged, simulated" if answer.simulated else "charged",
            help="What 1,000 such queries are charged",
        )
        told = pd.DataFrame([{"app": app, "variant": answer.variant, "accuracy": answer.accuracy}])
        (value,), quality = widgets.quality(told)
        named = formats.heading(quality["label"])
        widgets.metric(named, formats.number(value), "of the variant", help="Measured when the model was registered")
        widgets.metric(
            "Batch", str(answer.batch), formats.count(answer.batch, "item", "items"), help="Computed together"
        )
    if answer.variant:
        st.markdown(f"Answered by **{answer.variant}** on {answer.worker} ({answer.hardware}).")
    if answer.members is not None:
        lacking = f"; {answer.missing} missing" if answer.missing else ""
        sure = "" if answer.confidence is None else f"; {formats.percent(answer.confidence)} agree"
        st.markdown(f"Answered together by **{', '.join(answer.members)}**{sure}{lacking}.")
    if answer.reason:
        st.markdown(f"Reason: {answer.reason}.")
    _outputs(answer)


def _outputs(answer: Answer) -> None:
    for output, array in answer.outputs.items():
        if array.ndim == 2 and array.shape[1] > 1 and array.dtype.kind == "f":
            _scores(output, array, answer.labels)
        elif array.size <= 200:
            said = f", {', '.join(answer.labels[:MAX_SCORES])}" if answer.labels else f" {answer.unit or ''}".rstrip()
            st.markdown(f"**{answer.target or output}**: `{json.dumps(_plain(array))}`{said}")
        else:
            st.markdown(f"**{output}**: {array.dtype} of shape {list(array.shape)}")


def _plain(array: Any) -> Any:
    if array.dtype.kind != "f":
        return array.tolist()
    return (
        [[float(f"{x:.6g}") for x in row] if isinstance(row, list) else float(f"{row:.6g}") for row in array.tolist()]
        if array.ndim <= 2
        else array.tolist()
    )


def _scores(output: str, array: Any, labels: list[str] | None) -> None:
    """The best classes of an item, as bars. labels: the name of each item's class, if classes have names."""
    item = 0
    if len(array) > 1:
        item = int(st.number_input(f"Item of {len(array)}", 1, len(array), 1, key=f"item-{output}", width=170)) - 1
    row = array[item].astype(float)
    best = np.argsort(-row, kind="stable")[:MAX_SCORES]
    name = f", {labels[item]}" if labels and item < len(labels) else ""
    st.markdown(f"**{output}**: class **{best[0]}{name}**")
    classes = classes_of(app) if labels and app is not None else []
    names = [classes[at] for at in best] if len(classes) == len(row) else best
    shown = pd.DataFrame({"class": names, "score": row[best]})
    low, high = min(0.0, float(np.nanmin(row))), max(1e-9, float(np.nanmax(row)))
    if low >= 0 and high <= 1:
        high = 1.0
    st.dataframe(
        shown,
        hide_index=True,
        width=520,
        key=f"scores-{output}",
        column_config={
            "class": st.column_config.Column("class", width="small", alignment="left"),
            "score": st.column_config.ProgressColumn("score", format="%.4g", min_value=low, max_value=high),
        },
    )


def page() -> None:
    if app is None:
        widgets.show_no_app()
        return
    specs, _ = signature()
    needs = widgets.choose_needs(app)
    try:
        arrays = choose_inputs(specs)
    except BadInput as error:
        st.error(f"{error}.", icon=":material/block:")
        arrays = None
    if st.button("Ask", type="primary", disabled=arrays is None, icon=":material/send:") and arrays is not None:
        st.session_state["seed"] = st.session_state.get("seed", 0) + 1
        send(arrays, needs)
    done = st.session_state.get(DONE)
    if done and done["app"] == app:
        show_done(done)
        st.caption(
            f"Trace {done['trace']}: spans of it are made where `telemetry.otlp_endpoint` is set.",
            help="docs/metrics.md, Traces",
        )
        st.page_link(
            "views/queries.py", label=f"Recent queries of {app}", icon=":material/list_alt:", query_params={"app": app}
        )


try:
    page()
except NoData as problem:
    st.error(f"**No data:** {problem}", icon=":material/cloud_off:")
    st.markdown(problem.remedy)
