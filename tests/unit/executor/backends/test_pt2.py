"""Archives of torch.export: what may run code is refused or left out, before torch opens the file."""

import json
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.backends import pt2

NODE = {
    "target": "torch.ops.aten.linear.default", "name": "linear", "inputs": [], "outputs": [],
    "metadata": {"a": "b;c"},
}  # fmt: skip
SYMBOL = {"as_expr": {"expr_str": "Symbol('s77', positive=True, integer=True)", "hint": {"as_int": 2}}}
TREE = json.dumps([1, {"type": "builtins.tuple", "context": "null", "children_spec": []}])


def graph(**changes) -> dict:
    base = {"nodes": [NODE], "tensor_values": {"x": {"sizes": [SYMBOL, {"as_int": 4}]}}}
    return {
        "graph_module": {"graph": base | changes, "module_call_graph": [{"signature": {"in_spec": TREE}}]},
        "guards_code": ["__import__('os').system('true')"],
        "verifiers": ["TRAINING"],
        "torch_version": "2.13.0+cpu",
    }


def entry(**changes) -> dict:
    return {"path_name": "weight_0", "use_pickle": False, "is_param": True, "tensor_meta": {"dtype": 7}} | changes


def archive(path: Path, *, model=None, weights=None, constants=None, extra=(), top="m", compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr(f"{top}/archive_format", "pt2")
        file.writestr(f"{top}/archive_version", "0")
        file.writestr(f"{top}/models/model.json", json.dumps(graph() if model is None else model))
        file.writestr(
            f"{top}/data/weights/model_weights_config.json", json.dumps({"config": weights or {"w.x": entry()}})
        )
        file.writestr(f"{top}/data/constants/model_constants_config.json", json.dumps({"config": constants or {}}))
        file.writestr(f"{top}/data/weights/weight_0", b"\0" * 16)
        file.writestr(f"{top}/data/sample_inputs/model.pt", b"\x80\x04 a pickle")
        for name, content in extra:
            file.writestr(name, content)
    return path


def reduced(tmp_path: Path, **changes) -> Path:
    target = tmp_path / "reduced.pt2"
    pt2.reduce(archive(tmp_path / "upload.pt2", **changes), target, 2**20)
    return target


def test_only_tensors_and_operators_remain(tmp_path):
    target = reduced(tmp_path, extra=[("m/extra/note.txt", "x"), ("m/data/aotinductor/model/a.so", "\x7fELF")])
    pt2.check(target)
    with zipfile.ZipFile(target) as file:
        names = {name.partition("/")[2] for name in file.namelist()}
        program = json.loads(file.read("model/models/model.json"))
        assert file.read("model/data/sample_inputs/model.pt") == b""
        assert file.read("model/data/weights/weight_0") == b"\0" * 16
    assert not any("extra" in name or "aotinductor" in name for name in names)
    assert (program["guards_code"], program["graph_module"]["graph"]["nodes"][0]["metadata"]) == ([], {})
    assert pt2.operators(target) == ["linear"]


def test_an_upload_is_not_taken_for_a_reduced_one(tmp_path):
    with pytest.raises(pt2.BadArchive, match="registration"):
        pt2.check(archive(tmp_path / "upload.pt2"))


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.system",
        "torch.load",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.__class__.__mro__",
        "torch.ops.load_library",
        "torch.ops.mine.evil.default",
        "_operator.methodcaller",
        "_operator.attrgetter",
        "math.__loader__.load_module",
        "#extension",
        "builtins.exec",
    ],
)
def test_operators_that_are_none_are_refused(tmp_path, target):
    with pytest.raises(pt2.BadArchive, match="target"):
        reduced(tmp_path, model=graph(nodes=[NODE | {"target": target}]))
    with pytest.raises(pt2.BadArchive, match="as_operator"):
        reduced(tmp_path, model=graph(arguments=[{"as_operator": target}]))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "s0.__class__",
        "Symbol('x y')",
        "Symbol('s0', integer=True, evil=(lambda: 1)())",
        "(lambda: 1)()",
        "[x for x in ()]",
        "exec('1')",
        "s0 + " * 1000,
    ],
)
def test_expressions_that_are_more_than_arithmetic_are_refused(tmp_path, text):
    with pytest.raises(pt2.BadArchive, match="expr_str"):
        reduced(tmp_path, model=graph(values={"expr_str": text}))


@pytest.mark.parametrize(
    "text", ["s0", "2*s1 + 1", "Max(1, s0)", "Mul(Integer(2), Symbol('u3', integer=True))", "s0 // 2"]
)
def test_arithmetic_is_let_through(tmp_path, text):
    pt2.check(reduced(tmp_path, model=graph(values={"expr_str": text})))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"weights": {"w": entry(use_pickle=True)}}, "pickled"),
        ({"weights": {"w": entry(path_name="../../etc/passwd")}}, "pickled"),
        ({"constants": {"c": entry(path_name="custom_obj_0")}}, "pickled"),
        ({"constants": {"c": entry(path_name="opaque_obj_0")}}, "pickled"),
        ({"weights": {"w'+evil": entry()}}, "not allowed"),
        ({"model": graph(nodes=[{"name": "x=evil()"}])}, "not allowed"),
        ({"model": graph(value={"as_custom_obj": {"name": "x"}})}, "custom object"),
        ({"model": graph(in_spec=json.dumps([1, {"type": "evil.Type", "children_spec": []}]))}, "in_spec"),
        (
            {
                "model": graph(
                    in_spec=json.dumps([1, {"type": None, "context": '{"__enum__": true}', "children_spec": []}])
                )
            },
            "in_spec",
        ),
        ({"model": []}, "not what torch.export writes"),
        ({"extra": [("m/../../evil", "x")]}, "strange name"),
        ({"extra": [("/etc/passwd", "x")]}, "strange name"),
        ({"extra": [("other/file", "x")]}, "torch.export"),
        ({"extra": [("m/large", "x" * 2**20)]}, "unpacks"),
        ({"extra": [("m/bomb", "x" * 500_000)], "compression": zipfile.ZIP_DEFLATED}, "compressed"),
    ],
)
def test_what_is_hidden_elsewhere_is_refused(tmp_path, changes, why):
    with pytest.raises(pt2.BadArchive, match=why):
        reduced(tmp_path, **changes)


@given(st.binary(max_size=300))
def test_any_other_bytes_are_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("bytes") / "upload.pt2"
    path.write_bytes(content)
    with pytest.raises(pt2.BadArchive):
        pt2.reduce(path, path.with_name("reduced.pt2"), 2**20)
    with pytest.raises(pt2.BadArchive):
        pt2.check(path)


def test_deep_nesting_ends_in_a_refusal(tmp_path):
    text = "[" * 100_000 + "]" * 100_000
    path = archive(tmp_path / "upload.pt2")
    with zipfile.ZipFile(path) as file:
        kept = {name: file.read(name) for name in file.namelist()}
    kept["m/models/model.json"] = f'{{"graph_module": {text}}}'.encode()
    with zipfile.ZipFile(path, "w") as file:
        for name, content in kept.items():
            file.writestr(name, content)
    with pytest.raises(pt2.BadArchive):
        pt2.reduce(path, tmp_path / "reduced.pt2", 2**20)
