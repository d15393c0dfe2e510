"""torch.export archives (.pt2) made harmless before torch sees them.

torch's own loader unpickles sample inputs and some weights, evaluates expressions and guards as Python, and resolves
operator names anywhere below `torch`. `reduce` copies an archive into one that holds only raw tensors and a graph of
ATen operators, and refuses what needs more; `check` proves that a file is such a copy. Only copies are ever loaded.
"""

import json
import re
import zipfile
from pathlib import Path
from typing import Any

from services.executor.backends.base import plain

MOST_ENTRIES = 20_000
MOST_RATIO = 200  # uncompressed to compressed; torch stores without compression
MOST_GRAPH_BYTES = 64 * 2**20

MODEL = "models/model.json"
SAMPLES = "data/sample_inputs/model.pt"
CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_CONTENT = re.compile(r"data/(weights/weight_\d+|constants/tensor_\d+)\Z")
_SMALL = {"archive_format", "archive_version", "byteorder", ".data/version", ".data/serialization_id", "version"}

_TARGET = re.compile(
    r"torch\.ops\.(aten|prims)\.((?!__)[A-Za-z0-9_]+|__i?(and|or|xor|lshift|rshift)__)\.(?!_)[A-Za-z0-9_]+\Z"
    r"|torch\.ops\.higher_order\.(wrap_with_set_grad_enabled|cond|while_loop)\Z"
    r"|_operator\.(getitem|add|sub|mul|truediv|floordiv|mod|neg|pow|and_|or_|not_|eq|ne|lt|le|gt|ge)\Z"
    r"|math\.(ceil|floor|trunc|sqrt)\Z"
    r"|torch\.sym_(max|min|not|int|float|ite|sum)\Z"
)
_FORBIDDEN_ATEN = ("torch.ops.aten.from_file",)  # maps files of this machine
_NAME = re.compile(r"[A-Za-z0-9_.+:-]*\Z")
_EXPRESSION = re.compile(
    r"(?:Symbol\('[su]\d+'(?:, (?:positive|nonnegative|integer|real|zero)=(?:True|False))*\)"
    r"|[su]\d+|Add|Mul|Pow|Integer|Rational|Max|Min|Mod|PythonMod|FloorDiv|CeilDiv|CleanDiv"
    r"|Eq|Ne|Equality|Unequality|Lt|Le|Gt|Ge|true|false|True|False|\d+|[-+*/(),<>=!&| ])*\Z"
)
_SPEC_TYPES = (None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")


class BadArchive(ValueError):
    """Not a torch.export archive, or one that needs more than tensors and operators. The text says what."""


def reduce(source: Path, target: Path, most_bytes: int) -> None:
    """Write the harmless copy of `source`. Raises BadArchive. most_bytes: of all contents, uncompressed."""
    try:
        with zipfile.ZipFile(source) as archive:
            names = _entries(archive, most_bytes)
            graph = _graph(_json(archive, names, MODEL))
            with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as copy:
                for name, entry in names.items():
                    if name in _SMALL or _CONTENT.match(name):
                        with archive.open(entry) as there, copy.open(f"model/{name}", "w", force_zip64=True) as here:
                            while piece := there.read(2**20):
                                here.write(piece)
                for name in CONFIGS:
                    copy.writestr(f"model/{name}", json.dumps(_config(_json(archive, names, name), name)))
                copy.writestr(f"model/{MODEL}", json.dumps(graph))
                copy.writestr(f"model/{SAMPLES}", b"")
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError, RuntimeError) as error:
        raise BadArchive(f"not a torch.export archive ({plain(error)}): save it with torch.export.save") from error


def check(path: Path) -> None:
    """Raises BadArchive unless `path` is what `reduce` writes."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = _entries(archive, 2**62)
            graph = _json(archive, names, MODEL)
            strange = [n for n in names if n not in (*_SMALL, *CONFIGS, MODEL, SAMPLES) and not _CONTENT.match(n)]
            if strange or names[SAMPLES].file_size or _graph(graph) != graph:
                raise BadArchive("this .pt2 file did not come through registration")
            for name in CONFIGS:
                _config(_json(archive, names, name), name)
    except (zipfile.BadZipFile, NotImplementedError, KeyError, OSError) as error:
        raise BadArchive(f"not a torch.export archive ({plain(error)}): save it with torch.export.save") from error


def operators(path: Path) -> list[str]:
    """The ATen operators of a reduced archive, without overloads: "linear", "conv2d", ..."""
    with zipfile.ZipFile(path) as archive:
        graph = _json(archive, _entries(archive, 2**62), MODEL)
    found: set[str] = set()
    _collect(graph, found)
    return sorted(found)


def _entries(archive: zipfile.ZipFile, most_bytes: int) -> dict[str, zipfile.ZipInfo]:
    """Entries by name below the archive's one top folder, after checks of their sizes and names."""
    infos = archive.infolist()
    if len(infos) > MOST_ENTRIES:
        raise BadArchive(f"the archive has {len(infos)} entries: at most {MOST_ENTRIES} are taken")
    if sum(info.file_size for info in infos) > most_bytes:
        raise BadArchive(f"the archive unpacks to more than {most_bytes // 2**20} MB")
    names: dict[str, zipfile.ZipInfo] = {}
    tops = set()
    for info in infos:
        top, _, rest = info.filename.partition("/")
        if not rest or top in {"", "..", "."} or ".." in rest.split("/") or "\\" in rest or "\0" in rest:
            raise BadArchive(f"the archive has an entry with a strange name: {info.filename[:60]!r}")
        if info.file_size > MOST_RATIO * max(1, info.compress_size):
            raise BadArchive(f"entry {rest[:60]!r} is compressed more than {MOST_RATIO} times")
        if rest in names:
            raise BadArchive(f"entry {rest[:60]!r} is there twice")
        tops.add(top)
        names[rest] = info
    if len(tops) != 1 or MODEL not in names or any(name not in names for name in CONFIGS):
        raise BadArchive("not a torch.export archive: save it with torch.export.save (torch 2.8 or later)")
    return names


def _json(archive: zipfile.ZipFile, names: dict[str, zipfile.ZipInfo], name: str) -> Any:
    info = names[name]
    if info.file_size > MOST_GRAPH_BYTES:
        raise BadArchive(f"{name} is larger than {MOST_GRAPH_BYTES // 2**20} MB")
    try:
        return json.loads(archive.read(info))
    except (ValueError, RecursionError) as error:
        raise BadArchive(f"{name} is not JSON: {error}") from error


def _config(config: Any, name: str) -> Any:
    """The table of weights or constants, after a check that it names raw tensors only."""
    try:
        entries = config["config"]
        for key, entry in entries.items():
            path = entry["path_name"]
            if entry["use_pickle"] or not _CONTENT.match(f"{name.rpartition('/')[0]}/{path}"):
                raise BadArchive(f"{key[:60]!r} is stored as a pickled object: only plain tensors are taken")
        _harmless(config)
    except (KeyError, TypeError, AttributeError) as error:
        raise BadArchive(f"{name} is not what torch.export writes") from error
    return config


def _graph(graph: Any) -> Any:
    """The graph without guards and metadata, after a check that every operator and expression in it is harmless."""
    if not isinstance(graph, dict) or "graph_module" not in graph:
        raise BadArchive(f"{MODEL} is not what torch.export writes")
    graph = dict(graph) | {"guards_code": []}
    try:
        return _harmless(graph)
    except RecursionError as error:
        raise BadArchive("the graph is nested too deeply") from error


def _harmless(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        if "as_custom_obj" in value:
            raise BadArchive("the graph uses a custom object: only tensors and ATen operators are taken")
        return {_text(k, ""): {} if k == "metadata" else _harmless(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_harmless(one, key) for one in value]
    return _text(value, key) if isinstance(value, str) else value


def _text(text: str, key: str) -> str:
    if key in {"target", "as_operator"}:
        good = _TARGET.match(text) is not None and not text.startswith(_FORBIDDEN_ATEN)
    elif key == "expr_str":
        good = len(text) < 1000 and _EXPRESSION.match(text) is not None
    elif key in {"in_spec", "out_spec"}:
        good = not text or _plain_spec(text)
    else:
        good = _NAME.match(text) is not None
    if not good:
        raise BadArchive(f"the graph has a {key or 'name'} that is not allowed: {text[:60]!r}")
    return text


def _plain_spec(text: str) -> bool:
    """Whether a pytree description is made of tuples, lists and dictionaries alone."""
    try:
        _, tree = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return False
    stack = [tree]
    while stack:
        node = stack.pop()
        if not isinstance(node, dict) or node.get("type") not in _SPEC_TYPES:
            return False
        context = node.get("context")
        if isinstance(context, str) and not re.fullmatch(r"[A-Za-z0-9_\", \[\].-]*", context):
            return False
        stack += node.get("children_spec", [])
    return True


def _collect(value: Any, found: set[str]) -> None:
    if isinstance(value, dict):
        target = value.get("target")
        if isinstance(target, str) and target.startswith("torch.ops.aten."):
            found.add(target.split(".")[3])
        for one in value.values():
            _collect(one, found)
    elif isinstance(value, list):
        for one in value:
            _collect(one, found)
